"""Prompts that are the same, and the table that remembers them."""

from __future__ import annotations

import random

import pytest

from mtptrain.data.duplicates import HashSet, hash64, normalise


@pytest.mark.parametrize(
    "text", ["what is ﬁre?", "What  is\tFIRE?", " what is fire?\n", "Ｗhat is fire?"]
)
def test_case_width_and_white_space_do_not_count(text: str) -> None:
    """One normal form for all of them."""
    assert normalise(text) == "what is fire?"


def test_the_hash_is_the_same_in_every_process() -> None:
    """Ids of rows without one come from it."""
    assert hash64(["a", "b"]) == hash64(iter(["a", "b"])) != hash64(["ab"])
    assert hash64(["prompt"]) == 14832251758147735480


def test_the_table_is_a_set_and_small() -> None:
    """Against Python's own, over several growths, with 0 and runs of neighbours among the numbers."""
    draw = random.Random(0)
    numbers = [draw.randrange(2**64) for _ in range(20_000)] + [0, 1, 2, 3, 2**64 - 1] * 2
    numbers += draw.sample(numbers, 5_000)
    table, python = HashSet(), set[int]()
    for number in numbers:
        number = number or 1  # as the table has it
        assert table.add(number) is (number not in python)
        python.add(number)
    assert len(table._slots) * 8 <= 30 * len(python) + 8192
