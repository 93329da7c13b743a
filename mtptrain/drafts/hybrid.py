"""Hybrid: a lookup's proposal where it hopes for enough, the head's everywhere else.

A lookup is strong on text that repeats itself and silent elsewhere; a head drafts anything, not very far. For
each sequence of a step the lookup is asked first, and its proposal is taken where its score, the tokens it
hopes to have accepted, reaches `threshold` (SuffixDecoding, arXiv 2411.04975: best near what the head has
accepted on average). There the head only refills its pages with the true rows, which costs it one row each,
so that it is ready whenever the lookup is not. A lookup that knows no scores counts as sure of all it says.
It gives up joining both into one tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base import (
    Draft,
    DraftConfig,
    Draw,
    Drawn,
    HeadConfig,
    Proposal,
    TrueRows,
    UnrollStep,
)
from mtptrain.targets.base import Target
from mtptrain.types import Completion, DraftBatch, UserError


@dataclass(frozen=True)
class HybridConfig(DraftConfig):
    """Two drafts of the shelf, and when the first is preferred."""

    lookup: DraftConfig
    head: HeadConfig
    threshold: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.lookup, HeadConfig | HybridConfig):
            raise UserError("draft.lookup must be a draft without weights, such as suffix or ngram")
        if not isinstance(self.head, HeadConfig):
            raise UserError("draft.head must be a head that is trained, such as mtp")
        if not self.threshold >= 0:
            raise UserError(f"draft.threshold={self.threshold} must be at least 0")

    @property
    def kind(self) -> str:
        return f"hybrid of {self.lookup.kind} and {self.head.kind}"

    def trained(self) -> DraftConfig | None:
        return self.head.trained()

    def weights_key(self) -> str:
        return self.head.weights_key()

    def around(self, trained: Draft | None, target: Target) -> Hybrid:
        head = self.head.around(trained, target)
        return Hybrid(self, self.lookup.build(target), head)

    def build(self, target: Target) -> Hybrid:
        return self.around(None, target)


class Hybrid(Draft):
    """Trained as its head is. Each part has memories of its own."""

    def __init__(self, config: HybridConfig, lookup: Draft, head: Draft) -> None:
        super().__init__()
        if lookup.num_kv_layers:
            raise UserError("draft.lookup must be a draft without weights, such as suffix or ngram")
        self.config: HybridConfig = config
        self.lookup, self.head = lookup, head
        self.taps = head.taps
        self.num_kv_layers, self.kv_shape = head.num_kv_layers, head.kv_shape
        self.shares_prefix = lookup.shares_prefix and head.shares_prefix
        self.vocab, self.says_confidence = head.vocab, head.says_confidence

    def unroll(
        self, batch: DraftBatch, steps: int, supervised: Tensor, backend: AttentionBackend
    ) -> Iterator[UnrollStep]:
        return self.head.unroll(batch, steps, supervised, backend)

    def label_rows(self, batch: DraftBatch, steps: int, supervised: Tensor) -> list[Tensor]:
        return self.head.label_rows(batch, steps, supervised)

    def calibrate(self, features: Tensor) -> None:
        self.head.calibrate(features)

    def head_rows(self) -> Tensor:
        return self.head.head_rows()

    def refill(self, rows: TrueRows) -> None:
        self.lookup.refill(_part(rows, "lookup"))
        self.head.refill(_part(rows, "head"))

    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        found = self.lookup.propose(_part(rows, "lookup"), num_draft_tokens, draw)
        scores = found.scores or tuple(float(len(chain)) for chain in found.token_ids)
        hopeful = [
            bool(chain) and score >= self.config.threshold
            for chain, score in zip(found.token_ids, scores, strict=True)
        ]
        sure = [i for i, hopes in enumerate(hopeful) if hopes]
        rest = [i for i, hopes in enumerate(hopeful) if not hopes]
        if sure:
            self.head.refill(_part(rows, "head").some(sure))
        if not rest:
            return found
        drafted = self._draft(_part(rows, "head").some(rest), rest, num_draft_tokens, draw)
        return _merged(found, drafted, rest)

    def _draft(
        self, rows: TrueRows, places: Sequence[int], num_draft_tokens: int, draw: Draw
    ) -> Proposal:
        """The head's proposal for some of the sequences, each drawing from its own stream."""

        def draw_theirs(logits: Tensor, among: Sequence[int] | None = None) -> Drawn:
            return draw(logits, places if among is None else [places[i] for i in among])

        most = min(num_draft_tokens, self.head.max_draft_tokens or num_draft_tokens)
        return self.head.propose(rows, most, draw_theirs)

    def finish(self, completion: Completion, common: dict[str, Any]) -> None:
        self.lookup.finish(completion, common.setdefault("lookup", {}))
        self.head.finish(completion, common.setdefault("head", {}))


def _part(rows: TrueRows, name: str) -> TrueRows:
    """The same rows with the memories of one of the two."""
    memories = tuple(memory.setdefault(name, {}) for memory in rows.memories)
    return replace(rows, memories=memories, common=rows.common.setdefault(name, {}))


def _merged(found: Proposal, drafted: Proposal, places: Sequence[int]) -> Proposal:
    """`found`, with the drafted chains at their places; a found token was certain, a drafted one has its law."""
    chains = list(found.token_ids)
    laws: list[Tensor | None] = [None] * len(chains)
    sure: list[Tensor | None] = [None] * len(chains)
    for k, place in enumerate(places):
        chains[place] = drafted.token_ids[k]
        laws[place] = None if drafted.probs is None else drafted.probs[k]
        sure[place] = None if drafted.confidence is None else drafted.confidence[k]
    return Proposal(tuple(chains), laws, drafted.vocab, confidence=sure)
