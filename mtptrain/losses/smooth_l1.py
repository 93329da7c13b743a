"""Smooth L1 between the draft's and the target's states.

It steadies a head that is trained one step deep, and needs no head GEMM. Given up: it ties the
draft to the target's features, which caps what more data can bring; drop it once training unrolls
(EAGLE-3, 2503.01840). Source: EAGLE (2401.15077).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from mtptrain.losses.base import FeatureLoss
from mtptrain.types import UserError


@dataclass(frozen=True)
class SmoothL1(FeatureLoss):
    """Mean over H of 0.5 d^2 / beta where |d| < beta, |d| - 0.5 beta elsewhere; beta > 0."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise UserError(f"loss.beta is {self.beta}: give a number above 0")

    def rows(self, draft_states: Tensor, target_states: Tensor) -> Tensor:
        draft, target = draft_states.float(), target_states.float()
        return smooth_l1_loss(draft, target, beta=self.beta, reduction="none").mean(-1)
