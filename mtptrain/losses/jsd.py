"""Generalised Jensen-Shannon divergence: both distributions against their mixture m.

m = beta p + (1 - beta) q, and the loss is beta KL(p || m) + (1 - beta) KL(q || m). It is bounded, so single
rows far off cannot rule a step; beta near 0 leans to KL(p || q), near 1 to KL(q || p), each times a factor
that goes to 0 with it. Given up: a gradient as large as KL's while the two are far apart. Source: GKD
(2306.13649), DistillSpec (2310.08461).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mtptrain.losses.base import Block, Term, VocabLoss
from mtptrain.types import UserError


@dataclass(frozen=True)
class JSD(VocabLoss):
    """0 < `beta` < 1; r = log(q / m): d/dz = (1 - beta) q (r - sum_x q r)."""

    beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise UserError(
                f"loss.beta is {self.beta}: give a number between 0 and 1, without both"
            )

    def terms(self, block: Block) -> tuple[Term, ...]:
        log_p, log_q = block.log_p, block.log_q
        log_m = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))
        from_p = (block.p * (log_p - log_m)).sum(-1)  # [C]
        ratio = log_q - log_m  # [C, Vd]
        from_q = (block.q * ratio).sum(-1)
        grad = ratio.sub_(from_q.unsqueeze(1)).mul_(block.q).mul_(1 - self.beta)
        return (Term(self.beta * from_p + (1 - self.beta) * from_q, grad),)
