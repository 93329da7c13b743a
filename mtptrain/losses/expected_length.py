"""Minus the expected acceptance length of a drafted chain, as the chance that a drafted token is lost.

With a_j = sum_x min(p, q) at unrolled step j, the token of step k is kept with the chance of all steps up to
it, s_k = a_0 ... a_k. A row's loss is 1 - s_k, so a chain of n rows adds up to n + 1 less its expected
acceptance length 1 + sum_k s_k. In that sum a step learns as much as the steps before and behind it let it matter:
its gradient is total variation's times sum_{k >= j} s_k / a_j. Training takes each step's mean and weighs it by
train.step_decay: what it minimises is that sum only with train.step_decay=1, and where all chains are as long. A
chain of one row is tv. Given up: what tv
gives up, twice over, for a weak first step silences all others; start with kl. A row without weight counts
as accepted. Source: the objective of speculative decoding itself (2211.17192, equation 1, without its
assumption that all steps are alike).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mtptrain.losses.base import Block, Rows, Term, VocabLoss


@dataclass(frozen=True)
class ExpectedLength(VocabLoss):
    """1 - s_k; s = sign(q - p): d(1 - a)/dz = 0.5 q (s - sum_x q s)."""

    def terms(self, block: Block) -> tuple[Term, ...]:
        sign = block.gap.sign()  # [C, Vd]
        mean = (block.q * sign).sum(-1, keepdim=True)
        return (Term(1 - block.acceptance, sign.sub_(mean).mul_(block.q).mul_(0.5)),)

    def mix(self, values: Tensor, rows: Rows) -> Tensor:
        kept = rows.by_chain(1 - values[0], absent=1.0).cumprod(0)  # [S, M]
        return 1 - rows.by_row(kept)
