"""Prompts told apart by 64 bits each: two that differ in case, width or white space only are the same.

A Python set of integers takes about a hundred bytes an entry; the table here takes 14 to 28, so that ten
million rows fit into a few hundred megabytes. It gives up certainty: among ten million different prompts two share
their 64 bits with a probability of 3 in a million, and then one prompt is missed.
"""

from __future__ import annotations

import unicodedata
from array import array
from collections.abc import Iterable
from hashlib import blake2b


def normalise(text: str) -> str:
    """NFKC, case folded, white space collapsed."""
    if not text.isascii():  # ASCII is its own NFKC
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def hash64(texts: Iterable[str]) -> int:
    """The same number in every process."""
    joined = "\x1f".join(texts).encode()
    return int.from_bytes(blake2b(joined, digest_size=8).digest(), "little")


class HashSet:
    """A set of 64-bit numbers: open addressing, at most 60 % full."""

    def __init__(self) -> None:
        self._slots, self._count = array("Q", bytes(8 << 10)), 0

    def add(self, value: int) -> bool:
        """False where it was in already."""
        if self._count * 5 > len(self._slots) * 3:
            held = self._slots
            self._slots, self._count = array("Q", bytes(16 * len(held))), 0
            for one in filter(None, held):
                self._put(one)
        return self._put(value or 1)  # 0 marks a free slot

    def _put(self, value: int) -> bool:
        slots, last = self._slots, len(self._slots) - 1
        at = value & last
        while held := slots[at]:
            if held == value:
                return False
            at = (at + 1) & last
        slots[at] = value
        self._count += 1
        return True
