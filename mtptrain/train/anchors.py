"""Which rows of a batch draft in training, and how far: all that are supervised, or some, drawn anew each time.

A head that drafts a whole block from a row pays for the block, so of a long document a part of the rows teaches
as much for less, and other ones the next time (the anchors of DFlash, arXiv 2602.06036, drawn without replacement
among supervised rows). Or ever fewer rows go on at each further depth, as later tokens are worth less and cost as
much (the draws of P-EAGLE, arXiv 2602.01469, in which a row goes on only where it has come so far). What is drawn is
a function of the seed and of the batch's number in the plan, so that a resumed run, and every rank that counts a
step's rows, draws the same. It gives up nothing of the context: rows that do not draft are read by those that do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtptrain.drafts.base import supervised_chain
from mtptrain.types import DraftBatch

EVERY_STEP = 1 << 30  # deeper than anything drafts


@dataclass(frozen=True)
class Anchors:
    """At most `per_document` rows of each document draft; 0: all. Of those that do, the share that drafts more than
    d tokens is `keep` ** d, and `least` at least. `everywhere`: prompts are supervised too."""

    per_document: int = 0
    everywhere: bool = False
    seed: int = 0
    keep: float = 1.0
    least: float = 0.0

    def of(self, batch: DraftBatch, number: int) -> DraftBatch:
        """The batch with its drawn rows; batches of other numbers have others."""
        if not self.per_document and self.keep == 1:
            return batch
        mask = torch.ones_like(batch.loss_mask) if self.everywhere else batch.loss_mask
        could = supervised_chain(mask, batch.cu_seqlens, 1)[0]
        order = torch.Generator().manual_seed((self.seed * 1_000_003 + number) & (2**63 - 1))
        lot = torch.rand(len(could), generator=order, dtype=torch.float64).to(could.device)
        document = torch.repeat_interleave(torch.diff(batch.cu_seqlens))
        ranked = torch.where(could, lot, 1.0).add(2 * document).argsort()  # documents stay in order
        rank = torch.empty_like(ranked)
        rank[ranked] = torch.arange(len(rank), device=rank.device) - batch.cu_seqlens[document]
        count = torch.bincount(document[could], minlength=len(batch.cu_seqlens) - 1)
        if self.per_document:
            count = count.clamp(max=self.per_document)
        drawn = could & (rank < count[document])
        depths = self._depths(rank.double() / count.clamp(min=1)[document])
        return replace(batch, depths=depths * drawn.long())

    def _depths(self, place: Tensor) -> Tensor:
        """How many tokens the row at each place of its document's draw, 0 to below 1, drafts."""
        if self.keep == 1:
            return torch.full_like(place, EVERY_STEP, dtype=torch.long)
        deep = place.clamp(min=1e-9).log().div(math.log(self.keep)).ceil()  # place < keep ** d
        return torch.where(place < self.least, EVERY_STEP, deep.clamp(1, EVERY_STEP).long())
