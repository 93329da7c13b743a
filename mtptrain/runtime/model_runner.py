"""Turns sequences into packed tensors and runs the target, or the draft, over their pages.

The only place where lists of the scheduler become tensors of the networks. Target and draft get their
contexts from the same function, over the same page tables. It gives up CUDA graphs: shapes follow the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext, PagedBatch
from mtptrain.drafts.base import Draft, TrueRows
from mtptrain.runtime.kv_pages import KVPool
from mtptrain.runtime.scheduler import EngineLimits, Sequence
from mtptrain.runtime.tree import Tree
from mtptrain.targets.base import Target, TargetOutput


@dataclass(frozen=True, eq=False)
class SequencePages:
    """The pages of the sequences of one step; see `drafts.base.Pages`."""

    runner: ModelRunner
    sequences: Seq[Sequence]

    def context(
        self, first_rows: Seq[int], lens: Seq[int], tails: Seq[Tensor] | None = None
    ) -> ForwardContext:
        return self.runner.context(self.sequences, first_rows, lens, tails)

    def keys_only(self, first_rows: Seq[int], lens: Seq[int]) -> ForwardContext:
        return self.runner.context(self.sequences, first_rows, lens, keys_only=True)


class ModelRunner:
    """Owns the KV pool: the target's layers first, then the draft's."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        backend: AttentionBackend,
        limits: EngineLimits,
        taps: tuple[str, ...],
    ) -> None:
        self.target, self.draft, self.backend, self.taps = target, draft, backend, taps
        self.common: dict[str, Any] = {}  # what the draft keeps over all sequences
        shapes = [target.kv_shape()] * target.num_layers
        if draft is not None:
            shapes += [draft.kv_shape or target.kv_shape()] * draft.num_kv_layers
        self.pool = KVPool(
            limits.num_pages,
            limits.page_size,
            shapes,
            target.head_weight.dtype,
            target.device,
        )

    @property
    def draft_row_bytes(self) -> int:
        """What the draft's layers of the pool take for one token."""
        n = self.target.num_layers
        return sum(x[0, :, 0].nbytes for x in (*self.pool.keys[n:], *self.pool.values[n:]))

    def context(
        self,
        sequences: Seq[Sequence],
        first_rows: Seq[int],
        lens: Seq[int],
        tails: Seq[Tensor] | None = None,
        keys_only: bool = False,
    ) -> ForwardContext:
        """Rows first..first + len - 1 of each sequence; sequences without rows are left out.

        `tails`, one for each sequence with rows, makes the newest rows token trees (see `PagedBatch`). With
        `keys_only` the rows leave their keys and values and ask nothing.
        """
        busy = [(s, a, n) for s, a, n in zip(sequences, first_rows, lens, strict=True) if n]
        tables = tuple(torch.tensor(s.pages) for s, _, _ in busy)
        size = self.pool.page_size
        slots = [
            self._slots(table, torch.arange(first, first + n))
            for table, (_, first, n) in zip(tables, busy, strict=True)
        ]
        on = self.target.device
        paged = PagedBatch(
            self.pool.keys,
            self.pool.values,
            size,
            tables,
            tuple(a + n for _, a, n in busy),
            torch.cat(slots).to(on),
            None if tails is None else tuple(tails),
        )
        lens = tuple(n for _, _, n in busy)
        if keys_only:
            return ForwardContext(self.backend, lens, paged, keys_only=True)
        return ForwardContext.over_pages(self.backend, lens, paged)

    def _slots(self, table: Tensor, rows: Tensor) -> Tensor:
        size = self.pool.page_size
        return table[rows // size] * size + rows % size

    def run_target(
        self, sequences: Seq[Sequence], rows: Seq[Seq[int]], trees: Seq[Tree] | None = None
    ) -> TargetOutput:
        """One target forward over each sequence's next tokens, which start at its `kv_len`; with `trees` they
        are the newest token and the nodes below it."""
        first, lens = [s.kv_len for s in sequences], [len(r) for r in rows]
        on = self.target.device
        ids = torch.tensor([t for r in rows for t in r], device=on)
        steps = [range(n) for n in lens] if trees is None else [(0, *t.depths) for t in trees]
        positions = [a + step for a, mine in zip(first, steps, strict=True) for step in mine]
        tails = None if trees is None else [t.mask() for t in trees]
        ctx = self.context(sequences, first, lens, tails)
        return self.target.forward(ids, torch.tensor(positions, device=on), ctx, self.taps)

    def keep_paths(self, sequences: Seq[Sequence], paths: Seq[Seq[int]]) -> None:
        """Moves the target's rows of the accepted nodes to where a chain has them; call before `kv_len` moves.

        The draft's rows stay: true ones are written over them.
        """
        source, goal = [], []
        for sequence, path in zip(sequences, paths, strict=True):
            moved = [(node, j) for j, node in enumerate(path) if node != j]
            if moved:
                rows = torch.tensor(moved) + sequence.kv_len + 1
                slots = self._slots(torch.tensor(sequence.pages), rows)
                source.append(slots[:, 0])
                goal.append(slots[:, 1])
        if source:
            on = self.target.device
            self.pool.move(torch.cat(source).to(on), torch.cat(goal).to(on), self.target.num_layers)

    def true_rows(self, sequences: Seq[Sequence], lens: Seq[int]) -> TrueRows:
        """The first `lens` pending rows of each sequence, for the draft."""
        features = [torch.cat(s.pending)[:n] for s, n in zip(sequences, lens, strict=True)]
        return TrueRows(
            tuple(s.token_ids for s in sequences),
            tuple(s.draft_len for s in sequences),
            tuple(lens),
            torch.cat(features),
            SequencePages(self, sequences),
            tuple(s.memory for s in sequences),
            self.common,
        )

    def store_features(
        self, sequences: Seq[Sequence], features: Seq[Tensor], capture: bool
    ) -> None:
        """Hands each sequence the features of its new rows; call after `kv_len` has moved."""
        for sequence, rows in zip(sequences, features, strict=True):
            if self.draft is not None:
                sequence.pending.append(rows)
            if capture:
                sequence.kept.append(rows)
