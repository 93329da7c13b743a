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
from mtptrain.targets.base import Target, TargetOutput


@dataclass(frozen=True, eq=False)
class SequencePages:
    """The pages of the sequences of one step; see `drafts.base.Pages`."""

    runner: ModelRunner
    sequences: Seq[Sequence]

    def context(self, first_rows: Seq[int], lens: Seq[int]) -> ForwardContext:
        return self.runner.context(self.sequences, first_rows, lens)


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
        layers = target.num_layers + (draft.num_kv_layers if draft else 0)
        self.pool = KVPool(
            limits.num_pages,
            limits.page_size,
            [target.kv_shape()] * layers,
            target.head_weight.dtype,
            target.device,
        )

    def context(
        self, sequences: Seq[Sequence], first_rows: Seq[int], lens: Seq[int]
    ) -> ForwardContext:
        """Rows first..first + len - 1 of each sequence; sequences without rows are left out."""
        busy = [(s, a, n) for s, a, n in zip(sequences, first_rows, lens, strict=True) if n]
        tables = tuple(torch.tensor(s.pages) for s, _, _ in busy)
        size = self.pool.page_size
        slots = []
        for table, (_, first, n) in zip(tables, busy, strict=True):
            row = torch.arange(first, first + n)
            slots.append(table[row // size] * size + row % size)
        on = self.target.device
        paged = PagedBatch(
            self.pool.keys,
            self.pool.values,
            size,
            tables,
            tuple(a + n for _, a, n in busy),
            torch.cat(slots).to(on),
        )
        return ForwardContext.over_pages(self.backend, [n for _, _, n in busy], paged)

    def run_target(self, sequences: Seq[Sequence], rows: Seq[Seq[int]]) -> TargetOutput:
        """One target forward over each sequence's next tokens, which start at its `kv_len`."""
        first, lens = [s.kv_len for s in sequences], [len(r) for r in rows]
        on = self.target.device
        ids = torch.tensor([t for r in rows for t in r], device=on)
        positions = torch.cat(
            [torch.arange(a, a + n) for a, n in zip(first, lens, strict=True)]
        ).to(on)
        return self.target.forward(ids, positions, self.context(sequences, first, lens), self.taps)

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
