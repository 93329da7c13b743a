"""What a loss of the shelf is: values and gradients of rows, in closed form, and what they are made into.

A vocabulary loss sees blocks of rows with both distributions and gives one or more terms with their
gradients in the logits; what it makes of the terms' values, one number a row, is plain autograd and may look
at whole chains. A feature loss looks at states alone. `losses.chunks` runs either over all rows. It gives up
second derivatives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Both distributions of C rows over the draft vocabulary, fp32. Read-only: terms share it."""

    q: Tensor  # [C, Vd] draft
    p: Tensor  # [C, Vd] target
    log_q: Tensor  # [C, Vd]
    gap: Tensor  # [C, Vd] q - p
    entropy: Tensor  # [C] of p, in nats
    acceptance: Tensor  # [C] sum_x min(p, q) = 1 - TV
    agreement: Tensor  # [C] 1 where both maxima are at one token (to fp32's last bit)
    labels: Tensor  # [C] draft-vocabulary ids, -1 outside it
    log_p_once: Tensor  # [C', Vd] of every target row once
    again: Tensor  # [C] row of `log_p_once`

    @property
    def log_p(self) -> Tensor:
        """[C, Vd], spread over the rows only where a loss asks for it."""
        once = len(self.log_p_once) == len(self.again)
        return self.log_p_once if once else self.log_p_once[self.again]


@dataclass(frozen=True)
class Term:
    """One summand of a loss on a block, with its gradient in closed form."""

    loss: Tensor  # [C]
    grad: Tensor  # [C, Vd] d loss of a row / d draft logits of that row


class Loss(ABC):
    """What the trainer is given: one loss of the shelf, or several added up."""

    @abstractmethod
    def summands(self) -> tuple[tuple[float, VocabLoss | FeatureLoss], ...]:
        """The losses that are added up, with their weights."""


class VocabLoss(Loss):
    """A loss on the draft's distribution. Subclasses are frozen dataclasses of hyperparameters."""

    needs_labels: ClassVar[bool] = False  # True: a row labelled -1 gets weight 0 in every sum
    num_terms: ClassVar[int] = 1

    @abstractmethod
    def terms(self, block: Block) -> tuple[Term, ...]:
        """Value and gradient of every summand on one block, which must not be written into."""

    def mix(self, values: Tensor, rows: Rows) -> Tensor:
        """Loss of every row, [K], from the values [N, K] of its N terms; autograd follows it back to them."""
        return values.sum(0)

    def summands(self) -> tuple[tuple[float, VocabLoss | FeatureLoss], ...]:
        return ((1.0, self),)


class FeatureLoss(Loss):
    """A loss on the draft's states themselves: no vocabulary, plain autograd."""

    @abstractmethod
    def rows(self, draft_states: Tensor, target_states: Tensor) -> Tensor:
        """Loss of every row, fp32: [R, H] and [R, H] to [R]."""

    def summands(self) -> tuple[tuple[float, VocabLoss | FeatureLoss], ...]:
        return ((1.0, self),)


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
