"""LK hybrid: from KL to total variation as the draft gets better.

lambda KL(p || q) + (1 - lambda) TV(p, q), lambda = exp(-eta alpha), with alpha the mean acceptance
of the call's rows (per unrolled step) taken as a constant. A weak draft learns by KL, whose
gradient never vanishes; a good one by the acceptance itself. Given up: a fourth GEMM a row, because
lambda is known only after the last row and the gradients of both terms are kept until then.
Source: 2602.23881, eta = 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mtptrain.losses.base import Block, Rows, Term, VocabLoss
from mtptrain.types import UserError


@dataclass(frozen=True)
class LK(VocabLoss):
    """`eta` >= 0: how fast acceptance hands over from KL to TV; 0 is pure KL."""

    num_terms: ClassVar[int] = 2

    eta: float = 3.0

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise UserError(f"loss.eta is {self.eta}: give a number of at least 0 (0 is pure KL)")

    def terms(self, block: Block) -> tuple[Term, ...]:
        cross_entropy = -(block.p * block.log_q).sum(-1)  # [C]
        sign = block.gap.sign()  # [C, Vd]
        mean = (block.q * sign).sum(-1, keepdim=True)
        tv_grad = sign.sub_(mean).mul_(block.q).mul_(0.5)
        return Term(cross_entropy - block.entropy, block.gap), Term(1 - block.acceptance, tv_grad)

    def mix(self, values: Tensor, rows: Rows) -> Tensor:
        kl, tv = values
        kl_share = (-self.eta * rows.means(1 - tv.detach())).exp()  # [K]
        return kl_share * kl + (1 - kl_share) * tv
