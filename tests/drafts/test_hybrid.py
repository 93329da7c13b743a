"""The hybrid: who proposes for whom, and with which law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mtptrain.drafts.base import Draft, DraftConfig, Draw, Drawn, HeadConfig, Proposal, TrueRows
from mtptrain.drafts.hybrid import Hybrid, HybridConfig
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.drafts.ngram import NgramConfig
from mtptrain.drafts.suffix import SuffixConfig
from mtptrain.types import Completion, Request, UserError

V = 4


class Lookup(Draft):
    """Says what it was told to."""

    def __init__(
        self, chains: tuple[tuple[int, ...], ...], scores: tuple[float, ...] | None
    ) -> None:
        super().__init__()
        self.said, self.heard = Proposal(chains, scores=scores), list[dict[str, Any]]()

    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        assert len(rows.token_ids) == len(self.said.token_ids)
        return self.said

    def finish(self, completion: Completion, common: dict[str, Any]) -> None:
        self.heard.append(common)


class Head(Draft):
    """Draws each token from a law of its own, and notes the rows it was shown."""

    vocab = torch.arange(V) + 10

    def __init__(self, max_draft_tokens: int | None = None) -> None:
        super().__init__()
        self.max_draft_tokens = max_draft_tokens
        self.refilled, self.drafted = list[list[float]](), list[list[float]]()

    def refill(self, rows: TrueRows) -> None:
        self.refilled.append(rows.features.flatten().tolist())
        rows.pages.context(rows.first_rows, rows.lens)

    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        self.drafted.append(rows.features.flatten().tolist())
        rows.pages.context(rows.first_rows, rows.lens)
        drawn = [draw(torch.zeros(len(rows.lens), V)) for _ in range(num_draft_tokens)]
        chains = (torch.stack([d.token for d in drawn], 1) + 10).tolist()
        laws = torch.stack([d.probs for d in drawn if d.probs is not None], 1)
        return Proposal(tuple(tuple(c) for c in chains), laws, self.vocab)


class Seen:
    """Pages that note which rows a context was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def context(self, first_rows: Sequence[int], lens: Sequence[int], tails: object = None) -> Any:
        self.asked.append((list(first_rows), list(lens)))


def _draw(streams: list[int]) -> Draw:
    """A sequence's k-th draw gives token k; `streams` counts the draws of each."""

    def draw(logits: Tensor, among: Sequence[int] | None = None) -> Drawn:
        own = range(len(streams)) if among is None else among
        assert len(own) == len(logits)
        tokens = [streams[i] for i in own]
        for i in own:
            streams[i] += 1
        laws = torch.stack([torch.full((V,), float(i)) for i in own])
        return Drawn(torch.tensor(tokens), laws)

    return draw


def _rows(pages: Seen) -> TrueRows:
    """Three sequences, with one, two and one new rows."""
    features = torch.tensor([[0.0], [1.0], [1.5], [2.0]])
    memories = ({}, {}, {})
    return TrueRows(([1, 2], [3, 4, 5], [6, 7]), (0, 4, 8), (1, 2, 1), features, pages, memories)


def _hybrid(
    scores: tuple[float, ...] | None,
    chains: tuple[tuple[int, ...], ...] = ((1,), (2, 3, 4), (5, 6)),
    deep: int | None = None,
) -> tuple[Hybrid, Head]:
    head = Head(deep)
    return Hybrid(HybridConfig(NgramConfig(), MTPConfig(), 2.0), Lookup(chains, scores), head), head


def test_the_lookup_is_preferred_where_its_score_reaches_the_threshold() -> None:
    """Just there the head only refills; elsewhere it drafts, drawing from those sequences' streams alone, and
    its tokens keep their law while the lookup's are certain."""
    hybrid, head = _hybrid((1.9, 2.0, 1.0))
    pages, streams = Seen(), [0, 0, 0]
    proposal = hybrid.propose(_rows(pages), 2, _draw(streams))
    assert proposal.token_ids == ((10, 11), (2, 3, 4), (10, 11)) and streams == [2, 0, 2]
    assert head.refilled == [[1.0, 1.5]] and head.drafted == [[0.0, 2.0]]
    assert pages.asked == [([0, 4, 0], [0, 2, 0]), ([0, 0, 8], [1, 0, 1])]
    assert proposal.probs is not None and proposal.probs[1] is None
    for i in (0, 2):
        law = proposal.probs[i]
        assert law is not None and torch.equal(law, torch.full((2, V), float(i)))
    assert proposal.vocab is head.vocab


def test_a_lookup_without_scores_counts_as_sure_of_each_token() -> None:
    """Prompt lookup knows none: its chains are as good as they are long, an empty one is no proposal."""
    hybrid, _ = _hybrid(None, ((1,), (2, 3), ()))
    proposal = hybrid.propose(_rows(Seen()), 1, _draw([0, 0, 0]))
    assert proposal.token_ids == ((10,), (2, 3), (10,))


def test_a_step_that_the_lookup_has_to_itself_drafts_nothing() -> None:
    """The head reads every true row and no more; with no hope anywhere it drafts for all."""
    hybrid, head = _hybrid((2.0, 2.0, 2.0))
    proposal = hybrid.propose(_rows(Seen()), 2, _draw([0, 0, 0]))
    assert proposal.token_ids == ((1,), (2, 3, 4), (5, 6)) and proposal.probs is None
    assert head.refilled == [[0.0, 1.0, 1.5, 2.0]] and not head.drafted
    hybrid, head = _hybrid((0.0, 0.0, 0.0))
    hybrid.propose(_rows(Seen()), 2, _draw([0, 0, 0]))
    assert head.drafted == [[0.0, 1.0, 1.5, 2.0]] and not head.refilled


def test_a_shallow_head_drafts_what_it_can() -> None:
    """The lookup may propose more than the head has modules."""
    hybrid, _ = _hybrid((0.0, 2.0, 0.0), deep=1)
    proposal = hybrid.propose(_rows(Seen()), 3, _draw([0, 0, 0]))
    assert [len(chain) for chain in proposal.token_ids] == [1, 3, 1]
    assert hybrid.max_draft_tokens is None


def test_both_parts_hear_of_what_ends_with_memories_of_their_own() -> None:
    """The lookup's common memory is its own at every call."""
    hybrid, _ = _hybrid(None)
    common: dict[str, Any] = {}
    for _ in range(2):
        hybrid.finish(Completion(Request("r", "all", (1,)), (2,), (), 1, "eos"), common)
    assert isinstance(hybrid.lookup, Lookup) and len(hybrid.lookup.heard) == 2
    assert hybrid.lookup.heard[0] is hybrid.lookup.heard[1] is common["lookup"]
    assert common["head"] is not common["lookup"]


@pytest.mark.parametrize(
    ("lookup", "head", "threshold", "key"),
    [
        (MTPConfig(), MTPConfig(), 1.0, "lookup"),
        (NgramConfig(), NgramConfig(), 1.0, "head"),
        (NgramConfig(), MTPConfig(), -1.0, "threshold"),
        (NgramConfig(), MTPConfig(), float("nan"), "threshold"),
        (HybridConfig(SuffixConfig(), MTPConfig()), MTPConfig(), 1.0, "lookup"),
    ],
)
def test_parts_that_do_not_fit_are_the_users_error(
    lookup: DraftConfig, head: HeadConfig, threshold: float, key: str
) -> None:
    """One line names the part."""
    with pytest.raises(UserError, match=f"^draft.{key}") as caught:
        HybridConfig(lookup, head, threshold)
    assert "\n" not in str(caught.value)
