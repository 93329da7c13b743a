"""Several losses of the shelf added up, each with a weight of its own.

Vocabulary and feature losses may be mixed. All that look at the vocabulary share one pass through the head
and its softmaxes; where one of them needs labels, unlabelled rows leave all of them. In a recipe each part
is a choice of the group `loss` under a name of its own, see recipes/loss/eagle.yaml; on the command line

    loss=weighted_sum loss.weights.cross_entropy=0 +loss@loss.parts.tv=tv +loss.weights.tv=0.5

and a weight of 0 leaves its part out. Given up: one head GEMM a vocabulary term, for the gradients of all
terms are kept apart until their values are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mtptrain.losses.base import FeatureLoss, Loss, VocabLoss
from mtptrain.types import UserError


@dataclass(frozen=True)
class WeightedSum(Loss):
    """sum_i weights[i] parts[i], over names i; weights are finite, at least 0, and one of them is above 0."""

    parts: Mapping[str, Loss]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        for name in [x for x in self.parts if x not in self.weights]:
            raise UserError(f"loss.parts.{name} has no weight: add +loss.weights.{name}=1")
        for name, weight in self.weights.items():
            if name not in self.parts:
                raise UserError(
                    f"loss.weights.{name} has no loss: add +loss@loss.parts.{name}=NAME"
                )
            if not 0 <= weight < math.inf:
                raise UserError(f"loss.weights.{name} is {weight}: give a number of at least 0")
        if not any(self.weights.values()):
            raise UserError("loss.weights are all 0: give one of them a number above 0")

    def summands(self) -> tuple[tuple[float, VocabLoss | FeatureLoss], ...]:
        used = [
            (self.weights[name], part) for name, part in self.parts.items() if self.weights[name]
        ]
        return tuple((own * w, loss) for own, part in used for w, loss in part.summands())
