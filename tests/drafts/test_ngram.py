"""Prompt lookup: the newest earlier place of the longest suffix."""

from __future__ import annotations

import random

import pytest
import torch

from mtptrain.drafts.base import TrueRows
from mtptrain.drafts.ngram import NgramConfig, NgramIndex
from mtptrain.types import UserError

DEFAULT = NgramConfig()


def _lookup(text: list[int], tokens: int = 3, config: NgramConfig = DEFAULT) -> tuple[int, ...]:
    index = NgramIndex(config)
    index.extend(text)
    return index.lookup(text, tokens)


def test_what_followed_the_last_time_is_proposed() -> None:
    """The newest earlier match counts, up to D tokens, and the match itself is not its own precedent."""
    assert _lookup([1, 2, 7, 8, 1, 2, 9, 9, 1, 2]) == (9, 9, 1)
    assert _lookup([1, 2, 3, 1, 2], 5) == (3, 1, 2)
    assert _lookup([1, 2, 3, 4]) == ()


def test_the_longest_suffix_wins() -> None:
    """A match of three tokens is preferred to a newer one of two; one token is not enough by default."""
    assert _lookup([5, 1, 2, 7, 1, 2, 8, 5, 1, 2], 1) == (7,)
    assert _lookup([2, 7, 3, 2]) == ()
    assert _lookup([2, 7, 3, 2], 2, NgramConfig(min_ngram=1)) == (7, 3)


def test_growing_in_steps_is_looking_at_once() -> None:
    """An index extended by a few tokens at a time proposes what one built from the whole text does."""
    draw = random.Random(0)
    text = [draw.randrange(4) for _ in range(120)]
    grown, end = NgramIndex(NgramConfig()), 1
    while end < len(text):
        grown.extend(text[:end])
        assert grown.lookup(text[:end], 4) == _lookup(text[:end], 4)
        end += draw.randrange(1, 5)


def test_each_sequence_has_its_own_index() -> None:
    """Nothing is found in another request; chains are ragged, an empty one is no proposal."""
    draft, memories = NgramConfig().build(), ({}, {})
    ids = ([1, 2, 3, 1, 2], [4, 5, 1, 2])
    rows = TrueRows(ids, (0, 0), (5, 4), torch.zeros(9, 0), None, memories)  # pyright: ignore
    proposal = draft.propose(rows, 4, None)  # pyright: ignore
    assert proposal.token_ids == ((3, 1, 2), ()) and proposal.probs is None


@pytest.mark.parametrize(("low", "high"), [(0, 3), (3, 2)])
def test_lengths_that_find_nothing_are_refused(low: int, high: int) -> None:
    """An empty suffix, or a shortest one above the longest, is the user's mistake."""
    with pytest.raises(UserError, match="min_ngram"):
        NgramConfig(min_ngram=low, max_ngram=high)
