"""Which tokens matter: those a reduced draft vocabulary keeps, and those that one training step scores.

Tokens are ranked by the target's own probability mass over a sample of stored rows plus their count in the
stored text. The mass covers tokens that the target would write but did not write in this sample, which
counts alone miss. Most of a step's work is the frozen head, so a step may score a part of the vocabulary:
the heaviest tokens, all tokens of the batch, and some of the rest drawn anew each step, which keeps every
token in its place (sampled softmax: Jean et al., arXiv 1412.2007, here on both distributions). It gives up
per-domain vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hidden_state_cache import FeatureStore
from mtptrain.drafts.base import Draft
from mtptrain.targets.base import Target
from mtptrain.types import DraftBatch

SAMPLED_ROWS = 16_384
CHUNK_ROWS = 128
HEAVIEST_SHARE = 0.75  # of the tokens that a step scores; the rest is drawn


def token_weights(store: FeatureStore, final: slice, target: Target) -> Tensor:
    """What each token weighs in the stored answers, [V] float64; `final` is that tap's place in a row."""
    weight = torch.zeros(target.vocab_size, dtype=torch.float64)
    stride = max(1, store.num_tokens // SAMPLED_ROWS)
    at = 0
    for index in range(len(store)):
        sample = store[index]
        weight += torch.bincount(sample.input_ids, minlength=target.vocab_size)
        offset = -at % stride
        weight += stride * _mass(sample.features[offset::stride, final], target)
        at += len(sample.input_ids)
    return weight


@torch.inference_mode()
def _mass(states: Tensor, target: Target) -> Tensor:  # [R, H] -> [V]
    mass = torch.zeros(target.vocab_size, dtype=torch.float64)
    for chunk in states.split(CHUNK_ROWS):
        mass += torch.softmax(target.logits(chunk.to(target.device)), -1).sum(0).double().cpu()
    return mass


def heaviest(weights: Tensor, size: int) -> tuple[int, ...]:
    """The `size` heaviest token ids, ascending; all ids (an empty tuple) where size is 0 or at least V."""
    if not 0 < size < len(weights):
        return ()
    return tuple(weights.topk(size).indices.sort().values.tolist())


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """The tokens over which one step compares target and draft."""

    rows: Tensor  # [S, H] of the frozen lm_head
    index: Tensor  # [V] place of each target id among them, -1: not scored
    own_rows: Tensor | None = None  # [S, H] of the draft's own head, trained, where it has one
    beside: Tensor | None = None  # [S, r] of the draft's trained columns, where it has some
    stands_for: Tensor | None = None  # [S] how many tokens each is drawn for; None: itself alone


class Scoring(Protocol):
    """Chooses what a step scores."""

    def of(self, batch: DraftBatch, step: int) -> ScoredTokens: ...

    def teaches(self, labels: Tensor) -> Tensor:
        """Which of a batch's labels [R] it scores, [R] bool."""
        ...


class AllTokens:
    """Every step scores all that the draft can say."""

    def __init__(self, draft: Draft, vocab_size: int) -> None:
        rows, self.draft = draft.frozen_rows(), draft
        ids = torch.arange(vocab_size) if draft.vocab is None else draft.vocab
        self.tokens = ScoredTokens(rows, _index(ids, vocab_size).to(rows.device))

    def of(self, batch: DraftBatch, step: int) -> ScoredTokens:
        own, beside = self.draft.own_head(), self.draft.beside_head()
        return replace(self.tokens, own_rows=own, beside=beside)

    def teaches(self, labels: Tensor) -> Tensor:
        return self.tokens.index[labels] >= 0


class SampledTokens:
    """`size` tokens a step and those of its batch; the same seed and step give the same tokens.

    A `draft` that trains rows of its own is compared on the tokens of those only.
    """

    def __init__(
        self, head: Tensor, weights: Tensor, size: int, seed: int, draft: Draft | None = None
    ) -> None:
        trains_rows = draft is not None and bool(draft.tables())
        self.draft = draft if trains_rows else None
        self.place = _places(self.draft, len(head))
        order = weights.argsort(descending=True, stable=True)
        order = order[self.place[order] >= 0]
        core = round(HEAVIEST_SHARE * size)
        self.head, self.core, self.rest = head, order[:core], order[core:]
        self.drawn, self.seed = size - core, seed

    def of(self, batch: DraftBatch, step: int) -> ScoredTokens:
        order = torch.Generator().manual_seed((self.seed * 1_000_003 + step) & (2**63 - 1))
        drawn = self.rest[torch.randint(len(self.rest), (self.drawn,), generator=order)]
        sure = torch.cat([self.core, batch.input_ids.cpu()]).unique()
        sure = sure[self.place[sure] >= 0]
        ids = torch.cat([sure, drawn]).unique()
        on = self.head.device
        index = _index(ids, len(self.head)).to(on)
        rows = self.head[ids.to(on)]
        if self.draft is None:
            return ScoredTokens(rows, index)
        place = self.place[ids].to(on)
        own, beside = (
            None if x is None else x[place]
            for x in (self.draft.own_head(), self.draft.beside_head())
        )
        return ScoredTokens(rows, index, own, beside, self._stands_for(ids, sure).to(on))

    def _stands_for(self, ids: Tensor, sure: Tensor) -> Tensor:
        """Of the tokens that are not scored anyway, those drawn stand for all alike, [S] fp32."""
        drawn = ~torch.isin(ids, sure)
        others = len(self.core) + len(self.rest) - len(sure)
        return torch.where(drawn, others / drawn.sum().clamp(min=1), 1.0)

    def teaches(self, labels: Tensor) -> Tensor:
        return self.place.to(labels.device)[labels] >= 0


def _places(draft: Draft | None, vocab_size: int) -> Tensor:
    """Row of each target id in the draft's own head, [V], -1: none; every id where there is no such head."""
    vocab = None if draft is None else draft.vocab
    return torch.arange(vocab_size) if vocab is None else _index(vocab, vocab_size)


def _index(ids: Tensor, vocab_size: int) -> Tensor:
    return torch.full((vocab_size,), -1).index_copy(0, ids, torch.arange(len(ids)))
