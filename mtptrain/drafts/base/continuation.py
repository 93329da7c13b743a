"""How a head begins as the target's own continuation: from which of its layers, on features of which size.

A head of the target's kind copies the layer behind its last tap and passes that tap through: before any
training it does what the target would do next. It gives up a random start, which asks for far more data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtptrain.drafts.base.head import HeadConfig
from mtptrain.targets.base import tap_layer
from mtptrain.types import UserError


@dataclass(frozen=True)
class AutoregressiveConfig(HeadConfig):
    """Which decoder layer of the target a head of the target's own kind starts from."""

    init_layer: int | None = None  # None: see `first_layer`

    @property
    def grows_trees(self) -> bool:
        return True

    def first_layer(self, num_layers: int) -> int:
        """The layer to start from: unless asked otherwise, the one behind the last tap, so that the head
        begins as the target's own continuation; layer 0 where none follows."""
        if self.init_layer is not None:
            if not 0 <= self.init_layer < num_layers:
                raise UserError(
                    f"draft.init_layer={self.init_layer} must lie in 0 to {num_layers - 1}, the target's layers"
                )
            return self.init_layer
        return self.next_layer(num_layers) or 0

    def next_layer(self, num_layers: int) -> int | None:
        """The layer behind the last tap; None behind the last layer and the final norm."""
        tapped = tap_layer(self.taps[-1])
        return None if tapped is None or tapped + 1 >= num_layers else tapped + 1

    def goes_on(self, num_layers: int) -> bool:
        """Whether the head starts from the very layer behind its last tap."""
        return self.first_layer(num_layers) == self.next_layer(num_layers)


@dataclass(frozen=True)
class ParallelConfig(HeadConfig):
    """What a head of several layers chooses that guesses several places at once. `mask_token_id` names the token
    whose frozen embedding stands for those to come: best one that the target never writes."""

    num_layers: int = 3
    mask_token_id: int = 0
    init_layer: int | None = None  # the target's layer to start from; None: see `first_layer`

    def first_layer(self, num_layers: int) -> int:
        """The target's layer that the first one starts as: unless asked otherwise, the one behind the last tap,
        or an earlier one where too few follow."""
        last = num_layers - self.num_layers
        if not 0 <= last < num_layers:
            raise UserError(
                f"draft.num_layers={self.num_layers} must lie in 1 to {num_layers}, the target's layers"
            )
        tapped = tap_layer(self.taps[-1])
        first = self.init_layer
        if first is None:
            return last if tapped is None else min(last, tapped + 1)
        if not 0 <= first <= last:
            raise UserError(
                f"draft.init_layer={first} must lie in 0 to {last}: {self.num_layers} layers follow from it"
            )
        return first

    def require_mask_token(self, vocab_size: int) -> None:
        """Raises UserError where the target has no such token."""
        if not 0 <= self.mask_token_id < vocab_size:
            raise UserError(
                f"draft.mask_token_id={self.mask_token_id} must lie in 0 to {vocab_size - 1}"
            )


def tap_size(features: Tensor, hidden_size: int) -> Tensor:
    """Median root mean square of the last tap's rows, 0-dim; the first token's is off the scale."""
    return features[:, -hidden_size:].float().pow(2).mean(-1).sqrt().median()


def fuse_layer(taps: int, hidden_size: int) -> nn.Linear:
    """Joins several taps into one state, without bias; starts as the identity on the last one."""
    fuse = nn.Linear(taps * hidden_size, hidden_size, bias=False)
    with torch.no_grad():
        fuse.weight.zero_()
        fuse.weight[:, -hidden_size:] = torch.eye(hidden_size)
    return fuse
