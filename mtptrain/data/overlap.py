"""Finds training prompts that will be validated: the same first question, or eight words in a row.

A head measured on what it was trained on looks better than it is. Only the user's texts are compared;
case, width, white space and punctuation do not count. Words that the held-out prompts lack rule out
nearly every place before any eight words are looked up. It gives up texts without spaces between words
(Chinese, Japanese, Thai): of those only whole first questions are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mtptrain.data.duplicates import normalise
from mtptrain.types import Conversation

WORDS = 8
RUN = bytes([True] * WORDS)
find_words = re.compile(r"\w+").findall


@dataclass(frozen=True)
class Match:
    """What a training prompt shares with one that is held out."""

    held_id: str
    words: str | None  # the eight words; None where the first question is the same


class HeldOut:
    """Prompts that are held out, ready to be looked up in."""

    def __init__(self, rows: Sequence[Conversation]) -> None:
        self._first: dict[str, str] = {}
        self._runs: dict[int, str] = {}
        for row in rows:
            texts = _user_texts(row)
            self._first.setdefault(next(texts, ""), row.id)
            for text in _user_texts(row):
                for run in _runs(find_words(text)):
                    self._runs.setdefault(hash(run), row.id)
        self._vocabulary = {
            w for row in rows for text in _user_texts(row) for w in find_words(text)
        }

    def match(self, row: Conversation) -> Match | None:
        """The first thing shared; None where there is nothing."""
        for number, text in enumerate(_user_texts(row)):
            if number == 0 and (held := self._first.get(text)) is not None:
                return Match(held, None)
            if found := self._shared_run(find_words(text)):
                return found
        return None

    def _shared_run(self, words: list[str]) -> Match | None:
        known = bytes(map(self._vocabulary.__contains__, words))
        at = known.find(RUN)
        while at >= 0:
            run = tuple(words[at : at + WORDS])
            if (held := self._runs.get(hash(run))) is not None:
                return Match(held, " ".join(run))
            at = known.find(RUN, at + 1)
        return None


def _user_texts(row: Conversation) -> Iterator[str]:
    return (normalise(turn.content) for turn in row.turns if turn.role == "user")


def _runs(words: list[str]) -> Iterable[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(WORDS)), strict=False)
