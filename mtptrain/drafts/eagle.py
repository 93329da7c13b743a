"""EAGLE: one decoder layer of the target's kind that continues the target's final features.

Row t joins Emb(x_{t+1}) and the feature of token t through `fc` (2H -> H, with bias), runs one layer without
an input norm, and hands its output to the frozen `lm_head` as the feature of token t + 1; the same output is
fed back (EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858, drafts trees with the same head).
`norms=restored` gives back the three norms, as later heads do. The paper's training is `loss=eagle
train.unroll_steps=1 train.feature_noise=0.1`.
It gives up what EAGLE-3 added: several taps, and an embedding that goes around `fc`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mtptrain.drafts.base.autoregressive import AutoregressiveHead
from mtptrain.drafts.base.continuation import AutoregressiveConfig, tap_size
from mtptrain.drafts.base.joined_layer import JoinedLayer
from mtptrain.drafts.base.step_rows import StepRows
from mtptrain.targets.base import Target
from mtptrain.types import UserError


@dataclass(frozen=True)
class EagleConfig(AutoregressiveConfig):
    """Choices of an EAGLE head."""

    norms: Literal["restored", "none"] = "none"
    embedding_scale: float = 0.0  # how much of the identity `fc` starts with on the embedding

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norms not in ("restored", "none"):
            raise UserError(f"draft.norms={self.norms} is unknown; use restored or none")
        if len(self.taps) != 1:
            raise UserError(f"draft=eagle reads one tap, not {len(self.taps)}; use draft=eagle3")

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

    def advance(self, step: int, rows: StepRows) -> Tensor:
        return self.body(rows)
