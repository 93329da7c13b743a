"""From logits to a distribution to a token, the same for target and draft.

Every sequence owns one generator seeded by the run's seed and its place in the request list, so what it
draws does not depend on who shares its batch. It gives up a fused kernel: sorting is done only where top-k
or top-p ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtptrain.types import SamplingParams


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Softmax in fp32 after temperature, top-k, top-p and min-p, [..., V] -> [..., V]; temperature above 0.

    In this order, which is that of transformers: each sees what the one before it has left.
    """
    scaled = logits.float() / params.temperature
    if params.top_k:
        kth = scaled.topk(min(params.top_k, scaled.shape[-1]), -1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    probs = torch.softmax(scaled, -1)
    probs = _nucleus(probs, params.top_p) if params.top_p < 1 else probs
    return _near_best(probs, params.min_p) if params.min_p else probs


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keeps the smallest set of best tokens whose mass reaches `top_p`, and renormalises."""
    ranked, order = probs.sort(-1, descending=True)
    before = ranked.cumsum(-1) - ranked
    kept = torch.zeros_like(probs).scatter(-1, order, ranked.masked_fill(before >= top_p, 0))
    return kept / kept.sum(-1, keepdim=True)


def _near_best(probs: Tensor, min_p: float) -> Tensor:
    """Keeps what has at least `min_p` of the best token's probability (arXiv 2407.01082), and renormalises."""
    kept = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0)
    return kept / kept.sum(-1, keepdim=True)


def generator(seed: int, place: int) -> torch.Generator:
    """The random stream of request number `place`."""
    return torch.Generator().manual_seed((seed * 1_000_003 + place) & (2**63 - 1))


def uniforms(generators: Sequence[torch.Generator]) -> Tensor:
    """One number in [0, 1) from each sequence's own stream, [B] float64."""
    return torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-transform sampling: probs [B, V] (need not sum to one), uniform [B] -> tokens [B]."""
    cumulative = probs.double().cumsum(-1)
    threshold = uniform.to(probs.device)[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return token.clamp(max=probs.shape[-1] - 1)


def draw_distinct(probs: Tensor, uniform: Tensor) -> Tensor:
    """Different tokens drawn one after another without putting any back: probs [B, V], uniform [B, k] -> [B, k].

    Where fewer than k tokens have any probability, the rest are any others.
    """
    left, free = probs.double().clone(), torch.ones_like(probs, dtype=torch.float64)
    tokens = []
    for numbers in uniform.unbind(1):
        law = torch.where(left.sum(-1, keepdim=True) > 0, left, free)
        tokens.append(draw(law, numbers))
        for x in (left, free):
            x.scatter_(1, tokens[-1][:, None], 0)
    return torch.stack(tokens, 1)
