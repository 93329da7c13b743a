"""DSpark: a block guessed in one forward, each guess corrected by the token before it, and how sure it is.

The backbone is DFlash's (see `base.block`), but slot k guesses the token behind it, so the anchor's slot guesses
the first. What the block cannot know, which token was drafted before, is added cheaply: the logits of slot k are
those of the frozen head + W2 W1[x_k], x_k the token before, over the vocabulary at low rank; drawing goes on
token by token, without attention. A linear map of [state ; W1[x_k]] guesses the chance that the token holds
(DSpark, arXiv 2607.05147; train it with loss=dspark). With `min_confidence` the runtime ends a chain
before its tokens' chances together fall below that: they are known before the token is drawn, so the law stays
the target's. W1 starts at zero, so a token that training never saw corrects nothing. It gives up the gated and
recurrent corrections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mtptrain.drafts.base.block import BlockConfig, BlockHead
from mtptrain.targets.base import Target
from mtptrain.types import UserError

MOST_RANK = 4096  # a folder that claims more would have us build it before its weights are compared


@dataclass(frozen=True)
class DSparkConfig(BlockConfig):
    """Choices of a DSpark head."""

    block_size: int = 4
    markov_rank: int = 64
    confidence: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.markov_rank <= MOST_RANK:
            raise UserError(f"draft.markov_rank={self.markov_rank} must lie in 1 to {MOST_RANK}")

    def build(self, target: Target) -> DSpark:
        return DSpark(self, target)


class DSpark(BlockHead):
    """See the file's opening."""

    first_slot: ClassVar[int] = 0

    def __init__(self, config: DSparkConfig, target: Target) -> None:
        super().__init__(config, target)
        rank = config.markov_rank
        self.markov_in = nn.Embedding(target.vocab_size, rank)
        self.markov_out = nn.Linear(rank, len(self.frozen_rows()), bias=False)
        nn.init.zeros_(self.markov_in.weight)
        nn.init.normal_(self.markov_out.weight, std=rank**-0.5)
        self.confidence_head = None
        self.says_confidence = config.confidence
        if config.confidence:
            self.confidence_head = nn.Linear(target.hidden_size + rank, 1)
            nn.init.zeros_(self.confidence_head.weight)
            nn.init.zeros_(self.confidence_head.bias)

    def beside_head(self) -> Tensor:
        return self.markov_out.weight

    def tables(self) -> list[Tensor]:
        return [self.markov_in.weight, self.markov_out.weight]

    def step_of(self, states: Tensor, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        joined = torch.cat([states, self.markov_in(previous)], -1)
        return joined, self._confidence(joined)

    def _confidence(self, joined: Tensor) -> Tensor | None:
        """Logits of the chances, [..., H + r] to [...]; they teach nothing but their own map."""
        head = self.confidence_head
        return None if head is None else head(joined.detach()).squeeze(-1)

    def correction(self, previous: Tensor) -> Tensor:
        return self.markov_out(self.markov_in(previous))
