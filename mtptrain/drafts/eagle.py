"""EAGLE: one decoder layer of the target's kind that continues the target's final features.

Row t joins Emb(x_{t+1}) and the feature of token t through `fc` (2H -> H, with bias), runs one layer without
an input norm, and hands its output to the frozen `lm_head` as the feature of token t + 1; the same output is
fed back (EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858, drafts trees with the same head).
`norms=restored` gives back the three norms, as later heads do. While training, `feature_noise` is added to
the features: uniform in a range of that width over a text of 512 tokens, wider in shorter ones, as in the
paper's code. The paper's loss compares features and tokens; `train.unroll_steps=1` is its training.
It gives up what EAGLE-3 added: several taps, and an embedding that goes around `fc`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext
from mtptrain.drafts.autoregressive import AutoregressiveConfig, AutoregressiveHead, tap_size
from mtptrain.drafts.base import UnrollStep
from mtptrain.drafts.joined_layer import JoinedLayer
from mtptrain.targets.base import Target
from mtptrain.types import DraftBatch, UserError

NOISE_TOKENS = 512  # length of the text at which noise has the width that is asked for


@dataclass(frozen=True)
class EagleConfig(AutoregressiveConfig):
    """Choices of an EAGLE head."""

    norms: Literal["restored", "none"] = "none"
    embedding_scale: float = 0.0  # how much of the identity `fc` starts with on the embedding
    feature_noise: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norms not in ("restored", "none"):
            raise UserError(f"draft.norms={self.norms} is unknown; use restored or none")
        if len(self.taps) != 1:
            raise UserError(f"draft=eagle reads one tap, not {len(self.taps)}; use draft=eagle3")
        if not 0 <= self.feature_noise < float("inf"):
            raise UserError(f"draft.feature_noise={self.feature_noise} must be 0 or above")

    def build(self, target: Target) -> Eagle:
        return Eagle(self, target)


class Eagle(AutoregressiveHead):
    """See the file's opening."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, target: Target) -> None:
        super().__init__(config, target)
        self.body = JoinedLayer(
            target,
            config.first_layer(target.num_layers),
            target.num_layers,
            restored=config.norms == "restored",
            embedding_scale=config.embedding_scale,
        )

    def calibrate(self, features: Tensor) -> None:
        """Where the head goes on with the layer behind its tap, `hnorm` keeps the size of that tap."""
        if self.config.goes_on(self.target.num_layers):
            self.body.keep_size(tap_size(features, self.target.hidden_size))

    def first_state(self, features: Tensor) -> Tensor:
        return features

    def advance(
        self,
        step: int,
        embedding: Tensor,
        state: Tensor,
        rotary: tuple[Tensor, Tensor],
        ctx: ForwardContext,
    ) -> Tensor:
        return self.body(embedding, state, rotary, ctx)

    def unroll(
        self, batch: DraftBatch, steps: int, supervised: Tensor, backend: AttentionBackend
    ) -> Iterator[UnrollStep]:
        if self.training and torch.is_grad_enabled() and self.config.feature_noise:
            batch = replace(batch, features=self._noisy(batch))
        yield from super().unroll(batch, steps, supervised, backend)

    def _noisy(self, batch: DraftBatch) -> Tensor:
        """Features [T, H] with noise whose width goes by the length of each row's text."""
        lens = torch.diff(batch.cu_seqlens)
        width = torch.repeat_interleave(self.config.feature_noise * NOISE_TOKENS / lens, lens)
        noise = torch.rand_like(batch.features) - 0.5
        return batch.features + noise * width.unsqueeze(1)
