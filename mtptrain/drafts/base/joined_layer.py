"""One decoder layer of the target's own kind over the join [embedding ; state]: the body of MTP and of EAGLE.

`fc` (2H -> H) joins both, and starts by passing the state through, so that a head begins as the target's own
layer on its own state. With `restored` norms both inputs are normed before `fc` and the output before the
head, and `fc` has no bias (DeepSeek-V3, arXiv 2412.19437); without, `fc` has a bias and the layer no input
norm (EAGLE, arXiv 2401.15077). It gives up the choice of an order: the embedding comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtptrain.drafts.base.step_rows import StepRows, input_norm, leave_keys, states_of
from mtptrain.targets.base import Target


class JoinedLayer(nn.Module):
    """Norms, `fc`, decoder layer and output norm of one step; [T, H] states in, [T, H] states out."""

    def __init__(
        self,
        target: Target,
        first_layer: int,
        pool_layer: int,
        *,
        restored: bool,
        embedding_scale: float,
    ) -> None:
        """Starts from the target's layer `first_layer` and `embedding_scale` of the identity on the embedding."""
        super().__init__()
        hidden = target.hidden_size
        self.enorm = nn.RMSNorm(hidden, eps=target.norm_eps) if restored else nn.Identity()
        self.hnorm = nn.RMSNorm(hidden, eps=target.norm_eps) if restored else nn.Identity()
        self.fc = nn.Linear(2 * hidden, hidden, bias=not restored)
        self.layer = target.new_decoder_layer(first_layer, pool_layer)
        self.norm = target.new_norm() if restored else nn.Identity()
        if not restored:
            self.layer.input_layernorm = nn.Identity()
        self._start_from_identity(hidden, embedding_scale)

    def _start_from_identity(self, hidden: int, embedding_scale: float) -> None:
        with torch.no_grad():
            self.fc.weight[:, :hidden] = embedding_scale * torch.eye(hidden)
            self.fc.weight[:, hidden:] = torch.eye(hidden)
            if self.fc.bias is not None:
                self.fc.bias.zero_()

    @torch.no_grad()
    def keep_size(self, size: Tensor) -> None:
        """Lets the normed state keep a size, 0-dim: the layer's own outputs are small or large only beside it."""
        if isinstance(self.hnorm, nn.RMSNorm):
            self.hnorm.weight.fill_(size)

    def forward(self, rows: StepRows) -> Tensor:
        x = self.fc(torch.cat([self.enorm(rows.embedding), self.hnorm(rows.state)], -1))
        if rows.ctx.keys_only:
            leave_keys(self.layer, input_norm(self.layer)(x), rows.rotary, rows.ctx)
            return x
        out = self.layer(x[None], position_embeddings=rows.rotary, ctx=rows.ctx)
        return self.norm(states_of(out))
