"""EAGLE-3: several taps fused into one state, and one decoder layer whose attention reads the embedding beside it.

The taps of token t go through `fc` (L * H -> H, no bias) into its state. The layer is the target's own, but
its queries, keys and values are made of [RMSNorm(Emb(x_{t+1})) ; RMSNorm(state)] (2H), while the residual
is the state alone; what comes out is normed before the head (EAGLE-3, arXiv 2503.01840). Fed back for the
next token is the state as it is, or, with `feedback=normed`, as the head reads it; `tap_norms` gives every
tap an RMSNorm before `fc` (both: EAGLE-3.1, arXiv 2605.09992). `head=own` trains a copy of the head's rows,
as the paper does; `shared` keeps the target's. It starts as the target's own layer behind the last tap: `fc`
passes that tap through, and the embedding's half of each projection is `embedding_scale` times the state's.
It gives up the paper's random start, which asks for far more data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mtptrain.drafts.base.autoregressive import AutoregressiveHead
from mtptrain.drafts.base.beside import read_both
from mtptrain.drafts.base.continuation import AutoregressiveConfig, fuse_layer, tap_size
from mtptrain.drafts.base.step_rows import StepRows, input_norm, leave_keys, states_of
from mtptrain.targets.base import Target
from mtptrain.types import UserError


@dataclass(frozen=True)
class Eagle3Config(AutoregressiveConfig):
    """Choices of an EAGLE-3 head."""

    tap_norms: bool = False
    feedback: Literal["raw", "normed"] = "raw"
    head: Literal["shared", "own"] = "shared"
    embedding_scale: float = (
        0.0  # how much of the layer's own weights the embedding's half starts with
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, allowed in {"feedback": ("raw", "normed"), "head": ("shared", "own")}.items():
            if getattr(self, key) not in allowed:
                raise UserError(
                    f"draft.{key}={getattr(self, key)} is unknown; use {' or '.join(allowed)}"
                )

    def build(self, target: Target) -> Eagle3:
        return Eagle3(self, target)


class Eagle3(AutoregressiveHead):
    """See the file's opening."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, target: Target) -> None:
        super().__init__(config, target, own_head=config.head == "own")
        hidden, taps = target.hidden_size, len(config.taps)
        self.tap_norms = nn.ModuleList(
            nn.RMSNorm(hidden, eps=target.norm_eps) for _ in config.taps if config.tap_norms
        )
        self.fc = fuse_layer(taps, hidden)
        self.embedding_norm = nn.RMSNorm(hidden, eps=target.norm_eps)
        first = config.first_layer(target.num_layers)
        self.layer = target.new_decoder_layer(first, target.num_layers)
        read_both(self.layer.self_attn, config.embedding_scale)
        self.norm = target.new_norm()

    @torch.no_grad()
    def calibrate(self, features: Tensor) -> None:
        """Where the layer is the one behind the last tap, that tap's norm keeps its size."""
        if self.config.tap_norms and self.config.goes_on(self.target.num_layers):
            norm = self.tap_norms[-1]
            assert isinstance(norm, nn.RMSNorm)
            norm.weight.fill_(tap_size(features, self.target.hidden_size))

    def first_state(self, features: Tensor) -> Tensor:
        if len(self.tap_norms):
            parts = features.split(self.target.hidden_size, -1)
            features = torch.cat([n(p) for n, p in zip(self.tap_norms, parts, strict=True)], -1)
        return self.fc(features)

    def advance(self, step: int, rows: StepRows) -> Tensor:
        beside = self.embedding_norm(rows.embedding)[None]
        if rows.ctx.keys_only:
            normed = input_norm(self.layer)(rows.state)
            leave_keys(self.layer, normed, rows.rotary, rows.ctx, beside)
            return rows.state
        x, rotary = rows.state[None], rows.rotary
        out = self.layer(x, position_embeddings=rotary, ctx=rows.ctx, beside=beside)
        state = states_of(out)
        return self.norm(state) if self.config.feedback == "normed" else state

    def scored(self, state: Tensor) -> Tensor:
        return state if self.config.feedback == "normed" else self.norm(state)
