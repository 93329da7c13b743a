"""Minus the logarithm of the chance that a drafted token is accepted, a = sum_x min(p, q).

Its gradient is that of total variation over a, so rows that are hardly ever accepted count most and the
gradient does not fade where total variation's does. All is done on logarithms: nothing underflows, and
nothing needs a clamp. Given up: rows that the draft can never learn keep pulling. Source: the alpha form of
the LK losses (2602.23881).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtptrain.losses.base import Block, Term, VocabLoss


@dataclass(frozen=True)
class LogAcceptance(VocabLoss):
    """u = q / a where q < p, else 0: -log a; d/dz = q sum_x u - u."""

    def terms(self, block: Block) -> tuple[Term, ...]:
        log_p, log_q = block.log_p, block.log_q
        least = torch.minimum(log_p, log_q)  # [C, Vd]
        log_acceptance = least.logsumexp(-1)  # [C]
        ours = least.sub_(log_acceptance.unsqueeze(1)).exp_().mul_(log_q < log_p)
        return (Term(-log_acceptance, ours.sum(-1, keepdim=True) * block.q - ours),)
