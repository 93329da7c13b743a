"""A loss as the shelf writes it: values and gradients of rows, in closed form; see the package's opening."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mtptrain.losses.base.rows import Rows


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
    needs_confidence: ClassVar[bool] = False  # True: for drafts that say how sure they are
    num_terms: ClassVar[int] = 1  # 0: it looks at what the rows hold and no closer

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
