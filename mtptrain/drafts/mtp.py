"""MTP: one decoder layer of the target's own kind that reads a feature and the next token's embedding.

Row t normalises Emb(x_{t+1}) and the feature of token t (RMSNorm each), joins them in the order
[embedding ; feature] through `fc` (2H -> H), runs one layer, and normalises again before the frozen
`lm_head`; the normed state is fed back for the next token (DeepSeek-V3 MTP, arXiv 2412.19437, and
EAGLE-3.1, arXiv 2605.09992). `norms=none` is the EAGLE-1 layout (arXiv 2401.15077: no input norm, none
before the head, `fc` with bias), kept for the ablation. `depth=1` shares one module over all steps
(FastMTP, arXiv 2509.18362); `depth=K` has K modules, each with pages of its own.
It gives up width: one layer a step, so depth of thought is the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mtptrain.drafts.base.autoregressive import AutoregressiveHead
from mtptrain.drafts.base.continuation import AutoregressiveConfig, fuse_layer, tap_size
from mtptrain.drafts.base.joined_layer import JoinedLayer
from mtptrain.drafts.base.step_rows import StepRows
from mtptrain.targets.base import Target
from mtptrain.types import UserError

MAX_DEPTH = 64  # a folder that claims more would have us build it before its weights are compared


@dataclass(frozen=True)
class MTPConfig(AutoregressiveConfig):
    """Choices of an MTP head."""

    norms: Literal["restored", "none"] = "restored"
    depth: int = 1
    embedding_scale: float = 0.0  # how much of the identity `fc` starts with on the embedding

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norms not in ("restored", "none"):
            raise UserError(f"draft.norms={self.norms} is unknown; use restored or none")
        if not 1 <= self.depth <= MAX_DEPTH:
            raise UserError(
                f"draft.depth={self.depth} is too small or too large; use 1 (shared) or the number of modules, "
                f"at most {MAX_DEPTH}"
            )

    @property
    def grows_trees(self) -> bool:
        return self.depth == 1

    def build(self, target: Target) -> MTP:
        return MTP(self, target)


class MTP(AutoregressiveHead):
    """See the file's opening."""

    config: MTPConfig

    def __init__(self, config: MTPConfig, target: Target) -> None:
        super().__init__(config, target, config.depth)
        hidden, taps = target.hidden_size, len(config.taps)
        first = config.first_layer(target.num_layers)
        self.steps = nn.ModuleList(
            JoinedLayer(
                target,
                first,
                target.num_layers + k,
                restored=config.norms == "restored",
                embedding_scale=config.embedding_scale,
            )
            for k in range(config.depth)
        )
        self.tap_norms = nn.ModuleList(
            nn.RMSNorm(hidden, eps=target.norm_eps) for _ in config.taps if taps > 1
        )
        self.fuse = fuse_layer(taps, hidden) if taps > 1 else nn.Identity()

    def calibrate(self, features: Tensor) -> None:
        """Where the head goes on with the layer behind its last tap, `hnorm` keeps the size of that tap."""
        if self.config.goes_on(self.target.num_layers):
            size = tap_size(features, self.target.hidden_size)
            for step in range(len(self.steps)):
                self._module(step).keep_size(size)

    def first_state(self, features: Tensor) -> Tensor:
        if not len(self.tap_norms):
            return features
        parts = features.split(self.target.hidden_size, -1)
        return self.fuse(torch.cat([n(p) for n, p in zip(self.tap_norms, parts, strict=True)], -1))

    def advance(self, step: int, rows: StepRows) -> Tensor:
        return self._module(step)(rows)

    def _module(self, step: int) -> JoinedLayer:
        module = self.steps[min(step, len(self.steps) - 1)]
        assert isinstance(module, JoinedLayer)
        return module
