"""Rows of token ids with a loss mask, and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from mtptrain.datasets.base import BadRow, DropRow
from mtptrain.datasets.tokenised import is_tokenised, tokenised_sample


def test_ids_and_mask_become_a_sample() -> None:
    """Masks of numbers and of truth values alike."""
    for mask in ([0, 1, 1], [False, True, True]):
        sample = tokenised_sample({"input_ids": [5, 6, 7], "loss_mask": mask}, "a", "all")
        assert sample.input_ids.tolist() == [5, 6, 7]
        assert sample.loss_mask.tolist() == [False, True, True]
    assert is_tokenised({"input_ids": []}) and not is_tokenised({"input_ids": None})


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [1]},
        {"input_ids": [1], "loss_mask": [1, 1]},
        {"input_ids": "1", "loss_mask": "1"},
        {"input_ids": [-1], "loss_mask": [1]},
        {"input_ids": [2**40], "loss_mask": [1]},
        {"input_ids": [[1]], "loss_mask": [1]},
        {"input_ids": [True], "loss_mask": [1]},
        {"input_ids": [1], "loss_mask": [2]},
        {"input_ids": [1], "loss_mask": [None]},
    ],
)
def test_anything_else_is_a_bad_row(row: dict[str, Any]) -> None:
    """Lengths, kinds and ranges."""
    with pytest.raises(BadRow):
        tokenised_sample(row, "a", "all")


def test_an_empty_mask_drops_the_row() -> None:
    """There is nothing to learn from it."""
    with pytest.raises(DropRow):
        tokenised_sample({"input_ids": [1, 2], "loss_mask": [0, 0]}, "a", "all")
