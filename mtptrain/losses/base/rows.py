"""Which rows a loss runs on, how they hang together, and what is summed over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The K rows of non-zero weight, those of one target row next to each other.

    A chain is what one origin drafts: at most one row a step, and none where the draft stopped or where
    the row has no weight.
    """

    kept: Tensor  # [K] index into the caller's R rows
    targets: Tensor  # [K] index into target_states
    steps: Tensor  # [K] unrolled step, below S
    chains: Tensor  # [K] number of the row's chain, below M
    num_chains: int  # M
    share: Tensor  # [S, K] fp32, the weight of each row in each step's sums
    count: Tensor  # [S]
    confidence: Tensor | None = None  # [K] logit of the draft's own guess of `acceptance`
    acceptance: Tensor | None = None  # [K] sum_x min(p, q), where the vocabulary was looked at

    def sums(self, values: Tensor) -> Tensor:
        """[K] to [S]; elementwise, so that neither autocast nor TF32 rounds a sum."""
        return (self.share * values).sum(1)

    def means(self, values: Tensor) -> Tensor:
        """The weighted mean over each row's step: [K] to [K]."""
        tiny = torch.finfo(torch.float32).tiny
        return (self.sums(values) / self.count.clamp(min=tiny))[self.steps]

    def by_chain(self, values: Tensor, absent: float) -> Tensor:
        """[K] to [S, M], `absent` where a chain has no row."""
        table = values.new_full((len(self.count), self.num_chains), absent)
        return table.index_put((self.steps, self.chains), values)

    def by_row(self, table: Tensor) -> Tensor:
        """[S, M] to [K]: the way back from `by_chain`."""
        return table[self.steps, self.chains]


@dataclass(frozen=True)
class LossSums:
    """Weighted sums over rows, fp32, never means: 0-dim, or [S] where `step_rows` names S steps."""

    loss: Tensor  # the only differentiable one
    count: Tensor  # of the row weights themselves
    acceptance: Tensor  # of sum_x min(p, q); zero where no part looks at the vocabulary
    agreement: Tensor  # of argmax p == argmax q; zero where no part looks at the vocabulary
