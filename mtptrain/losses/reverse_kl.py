"""Reverse Kullback-Leibler divergence KL(q || p), the draft's q first.

It punishes what the draft says and the target would not, and lets go of tokens that the draft cannot
reach anyway: a small draft keeps to the target's main tokens. Given up: where q is near zero its gradient
vanishes, whatever p is, so a token that the draft has lost does not come back. Source: MiniLLM
(2306.08543), DistillSpec (2310.08461).
"""

from __future__ import annotations

from dataclasses import dataclass

from mtptrain.losses.base import Block, Term, VocabLoss


@dataclass(frozen=True)
class ReverseKL(VocabLoss):
    """r = log(q / p): sum_x q r; d/dz = q (r - sum_x q r)."""

    def terms(self, block: Block) -> tuple[Term, ...]:
        ratio = block.log_q - block.log_p  # [C, Vd]
        loss = (block.q * ratio).sum(-1)
        return (Term(loss, ratio.sub_(loss.unsqueeze(1)).mul_(block.q)),)
