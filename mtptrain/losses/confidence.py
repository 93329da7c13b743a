"""Binary cross-entropy between a draft's confidence and the acceptance that it really has.

Acceptance, sum_x min(p, q), is the exact chance that a sampled token of the row holds; it is a constant here, so
that the draft learns to know its strength, not to be weak where that is easier to say. It teaches nothing else:
add it to a loss that does, as recipes/loss/dspark.yaml. Where train.scored_tokens scores a sample, acceptance is
its estimate over all that the draft can say. Given up: the target's mass outside a reduced draft vocabulary, which
is not looked at, and makes the confidence too high by about as much; and calibration, which its own optimum would
have and which few epochs do not reach. Source: DSpark (2607.05147).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from mtptrain.losses.base import Block, Rows, Term, VocabLoss
from mtptrain.types import UserError


@dataclass(frozen=True)
class Confidence(VocabLoss):
    """-a log c - (1 - a) log(1 - c), c the draft's guess of its acceptance a."""

    needs_confidence: ClassVar[bool] = True
    num_terms: ClassVar[int] = 0

    def terms(self, block: Block) -> tuple[Term, ...]:
        return ()

    def mix(self, values: Tensor, rows: Rows) -> Tensor:
        if rows.confidence is None or rows.acceptance is None:
            raise UserError(
                "loss=confidence needs a draft that says how sure it is; use draft=dspark"
            )
        return binary_cross_entropy_with_logits(rows.confidence, rows.acceptance, reduction="none")
