"""Forward Kullback-Leibler divergence KL(p || q), the target's p first.

Its gradient q - p never vanishes while the two differ, so it is the loss to start with. Given up:
it spends capacity on all of p, where acceptance only counts min(p, q) (see lk). Source: DistillSpec
(2310.08461), and the soft cross-entropy of EAGLE-3 (2503.01840), which has the same gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtptrain.losses.base import Block, Term, VocabLoss


@dataclass(frozen=True)
class KL(VocabLoss):
    """sum_x p log(p / q); d/dz = q - p."""

    def terms(self, block: Block) -> tuple[Term, ...]:
        cross_entropy = -(block.p * block.log_q).sum(-1)  # [C]
        return (Term(cross_entropy - block.entropy, block.gap),)
