"""Prompt lookup: propose what followed the last time the newest tokens stood in this sequence.

The model-free baseline that every report shows (prompt lookup decoding, as in transformers and vLLM). The
longest suffix of `max_ngram` down to `min_ngram` tokens is looked up in an index that grows with the
sequence, so a step costs O(max_ngram), whatever the length. It gives up matches across requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtptrain.drafts.base import Draft, DraftConfig, Draw, Proposal, TrueRows
from mtptrain.targets.base import Target
from mtptrain.types import UserError


@dataclass(frozen=True)
class NgramConfig(DraftConfig):
    """Lookup lengths; defaults as in the field's baseline (2 to 4)."""

    min_ngram: int = 2
    max_ngram: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise UserError(
                f"draft.min_ngram={self.min_ngram} and draft.max_ngram={self.max_ngram} match nothing; "
                "use 1 <= min_ngram <= max_ngram"
            )

    def build(self, target: Target | None = None) -> Ngram:
        return Ngram(self)


class NgramIndex:
    """Where each n-gram of one sequence was last followed by something; extended, never rebuilt."""

    def __init__(self, config: NgramConfig) -> None:
        self.lengths = range(config.max_ngram, config.min_ngram - 1, -1)
        self.next_place: dict[tuple[int, ...], int] = {}
        self.indexed = 0  # n-grams that end before this token are in the index

    def extend(self, token_ids: list[int]) -> None:
        """Indexes every n-gram that is followed by a known token."""
        for end in range(max(self.indexed, 1), len(token_ids)):
            for n in self.lengths:
                if n <= end:
                    self.next_place[tuple(token_ids[end - n : end])] = end
        self.indexed = len(token_ids)

    def lookup(self, token_ids: list[int], num_draft_tokens: int) -> tuple[int, ...]:
        """Up to D tokens that followed the newest earlier match of the longest suffix; empty if none."""
        for n in self.lengths:
            place = self.next_place.get(tuple(token_ids[-n:])) if n <= len(token_ids) else None
            if place is not None:
                return tuple(token_ids[place : place + num_draft_tokens])
        return ()


class Ngram(Draft):
    """Keeps one index per sequence in the sequence's memory."""

    def __init__(self, config: NgramConfig) -> None:
        super().__init__()
        self.config: NgramConfig = config

    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        chains = []
        for ids, memory in zip(rows.token_ids, rows.memories, strict=True):
            index = memory.setdefault("index", NgramIndex(self.config))
            index.extend(ids)
            chains.append(index.lookup(ids, num_draft_tokens))
        return Proposal(tuple(chains))
