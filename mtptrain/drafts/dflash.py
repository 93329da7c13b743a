"""DFlash: a block of masks behind the newest token, all of whose tokens are guessed in one forward.

Slot k of a block stands for the token k behind its anchor, and guesses it; slot 0, the anchor itself, guesses
nothing (block diffusion with one step of denoising: DFlash, arXiv 2602.06036; see `base.block`). The paper's
weights of the slots are train.step_decay = exp(-1 / gamma), gamma 4 for blocks of 8 and 7 for 16, or the loss
d_pace; its anchors are train.anchors. It gives up what dspark adds: a slot does not know what was drafted
before it, so a sampled chain may join halves of two answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mtptrain.drafts.base import TrueRows
from mtptrain.drafts.base.block import BlockConfig, BlockHead
from mtptrain.layers.product import product
from mtptrain.targets.base import Target


@dataclass(frozen=True)
class DFlashConfig(BlockConfig):
    """Choices of a DFlash head: those of every block head."""

    @property
    def independent_places(self) -> bool:
        return True

    def build(self, target: Target) -> DFlash:
        return DFlash(self, target)


class DFlash(BlockHead):
    """See the file's opening."""

    first_slot: ClassVar[int] = 1

    def reads_ahead(self, step: int) -> int:
        return 1  # the anchor

    @torch.inference_mode()
    def place_logits(self, rows: TrueRows, num_draft_tokens: int) -> Tensor:
        """[B, D, Vd], of each drafted place, whatever is drafted before it; refills pages."""
        return product(self.guess(rows, num_draft_tokens)[0], self.frozen_rows())
