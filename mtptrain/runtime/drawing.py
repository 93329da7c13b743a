"""How a step's drafted tokens are drawn: by the same law as the target's, each sequence from its own stream.

A greedy draft has no law: its tokens are certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.drafts.base import Drawn
from mtptrain.runtime.sampler import draw, draw_distinct, probabilities, uniforms
from mtptrain.types import SamplingParams


@dataclass(frozen=True, eq=False)
class Drawing:
    """The draws of one step, for B sequences; a `Draw` of chains."""

    params: SamplingParams
    generators: Sequence[torch.Generator]

    def __call__(self, logits: Tensor, among: Sequence[int] | None = None) -> Drawn:
        if self.params.temperature == 0:
            return Drawn(logits.argmax(-1), None)
        probs = probabilities(logits, self.params)
        own = self.generators if among is None else [self.generators[i] for i in among]
        return Drawn(draw(probs, uniforms(own)), probs)

    def distinct(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """k different tokens behind each of F rows of every sequence, drawn without putting back, and the laws
        that the first of them come from: logits [B, F, Vd] to [B, F, k] and [B, F, Vd]; temperature above 0."""
        laws = probabilities(logits, self.params)
        shape = (logits.shape[1], k)
        numbers = [torch.rand(shape, generator=g, dtype=torch.float64) for g in self.generators]
        tokens = draw_distinct(laws.flatten(0, 1), torch.cat(numbers).to(laws.device))
        return tokens.unflatten(0, laws.shape[:2]), laws
