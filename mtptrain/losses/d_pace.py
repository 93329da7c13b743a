"""Cross-entropy whose rows weigh as much as the rest of their chain depends on them.

c_j = alpha + (1 - alpha) q[label] stands for the chance that step j is accepted, C_k = c_0 ... c_k for that of
reaching beyond step k, and row j weighs sum_{k >= j} C_k, taken as a constant: while first steps are weak later
ones weigh little, and they join as those improve. The softening alpha keeps a bad first step from silencing the
others: where nothing is accepted row j of n, from 0, still weighs alpha^(j+1) + ... + alpha^n. Set
train.step_decay=1, or both weights apply. Given up: what cross_entropy gives up; and a row without weight counts as
certain and adds nothing. Source: D-PACE (2605.18810), alpha = 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mtptrain.losses.base import Block, Rows, Term, VocabLoss
from mtptrain.types import UserError


@dataclass(frozen=True)
class DPace(VocabLoss):
    """-w log q[label]; d/dz = w (q - onehot(label)); `alpha` from 0 to 1, where 1 weighs by the steps left."""

    needs_labels: ClassVar[bool] = True

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UserError(f"loss.alpha is {self.alpha}: give a number from 0 to 1")

    def terms(self, block: Block) -> tuple[Term, ...]:
        label = block.labels.unsqueeze(1)  # [C, 1]
        grad = block.q.clone()
        grad.scatter_add_(1, label, -grad.new_ones(label.shape))
        return (Term(-block.log_q.gather(1, label).squeeze(1), grad),)

    def mix(self, values: Tensor, rows: Rows) -> Tensor:
        cross_entropy = values[0]
        soft = self.alpha + (1 - self.alpha) * (-cross_entropy.detach()).exp()
        there = rows.by_chain(torch.ones_like(soft), absent=0.0)  # [S, M]
        reached = rows.by_chain(soft, absent=1.0).cumprod(0) * there
        return rows.by_row(reached.flip(0).cumsum(0).flip(0)) * cross_entropy
