"""Medusa: heads that each guess one later token from the same feature, without reading what was drafted.

Head i of row t passes the feature of token t through residual blocks x + SiLU(W x + b) and scores it with
the frozen rows of `lm_head`, for token t + 2 + i (Medusa, arXiv 2401.10774, where every head has a vocabulary
matrix of its own). All blocks start at zero, so every head begins as the target's guess of the next token;
another tap than `final` is normed first, as the target does. A proposal costs no pages, no attention and no
steps one after another. It gives up what follows from that: a head does not know the tokens before its own,
so chains break soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base import (
    Draw,
    Head,
    HeadConfig,
    Proposal,
    TrueRows,
    UnrollStep,
    answer_chain,
    proposal_of,
)
from mtptrain.layers.product import product
from mtptrain.targets.base import Target
from mtptrain.types import DraftBatch, UserError

MOST = 64  # heads, or blocks of one: a folder that claims more is not built before its weights are compared


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """Choices of Medusa heads."""

    num_heads: int = 4  # the most tokens it can draft
    num_blocks: int = 1  # residual blocks of each head

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("num_heads", "num_blocks"):
            if not 1 <= getattr(self, key) <= MOST:
                raise UserError(f"draft.{key}={getattr(self, key)} must lie in 1 to {MOST}")
        if len(self.taps) != 1:
            raise UserError(f"draft=medusa reads one tap, not {len(self.taps)}; name one")

    @property
    def independent_places(self) -> bool:
        return True

    def build(self, target: Target) -> Medusa:
        return Medusa(self, target)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), [R, H] to [R, H]; starts as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(Head):
    """See the file's opening."""

    concat_order = ("feature",)
    reads_embedding = False
    position_rule = "none"

    def __init__(self, config: MedusaConfig, target: Target) -> None:
        super().__init__(config, target)
        self.max_draft_tokens = config.num_heads
        self.norm = nn.Identity() if config.taps == ("final",) else target.new_norm()
        blocks = range(config.num_blocks)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(target.hidden_size) for _ in blocks))
            for _ in range(config.num_heads)
        )

    def reads_ahead(self, step: int) -> int:
        return 0

    def unroll(
        self, batch: DraftBatch, steps: int, supervised: Tensor, backend: AttentionBackend
    ) -> Iterator[UnrollStep]:
        chain = answer_chain(batch, min(steps, len(self.heads)), supervised)
        for i, (head, alive) in enumerate(zip(self.heads, chain, strict=False)):
            rows = alive.nonzero().squeeze(1)
            yield UnrollStep(head(self.norm(batch.features[rows])), rows + 1 + i, rows + 2 + i)

    @torch.inference_mode()
    def place_logits(self, rows: TrueRows, num_draft_tokens: int) -> Tensor:
        last = torch.stack([x[-1] for x in rows.features.split(list(rows.lens))])
        state = self.norm(last)
        states = torch.stack([head(state) for head in self.heads[:num_draft_tokens]], 1)
        return product(states, self.head_rows())

    @torch.inference_mode()
    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        drawn = [draw(x) for x in self.place_logits(rows, num_draft_tokens).unbind(1)]
        chains = zip(*(self.target_ids(d.token) for d in drawn), strict=True)
        return proposal_of(list(chains), drawn, self)
