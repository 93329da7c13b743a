"""Cross-entropy on the token that follows: the hard-label loss.

It asks nothing of the target but its answers, and suits answers that the target wrote itself. Given
up: one sample says less than the whole of p, and rows whose next token lies outside the draft
vocabulary teach nothing (they leave every sum, `count` too). The target's softmax is still taken,
for `acceptance`. Source: FastMTP (2509.18362), Medusa (2401.10774).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mtptrain.losses.base import Block, Term, VocabLoss


@dataclass(frozen=True)
class CrossEntropy(VocabLoss):
    """-log q[label]; d/dz = q - onehot(label)."""

    needs_labels: ClassVar[bool] = True

    def terms(self, block: Block) -> tuple[Term, ...]:
        label = block.labels.unsqueeze(1)  # [C, 1]
        grad = block.q.clone()
        grad.scatter_add_(1, label, -grad.new_ones(label.shape))
        return (Term(-block.log_q.gather(1, label).squeeze(1), grad),)
