"""An attention that reads the embedding beside the state, as in EAGLE-3: its input maps take 2H.

The layer stays the family's own in every other detail, and the residual stays the state's alone. It gives up
families whose attention makes queries, keys and values in another way than by the maps named here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mtptrain.types import UserError

# linear maps that read an attention's input, of all families: plain, fused, and with latent keys
INPUT_MAPS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa")


def read_both(attention: Any, embedding_scale: float) -> None:
    """Widens an attention's input maps to [embedding ; state]. Raises UserError where it finds none.

    The embedding travels down the layer as keyword `beside`, as the context does, and is joined to the normed
    state at the attention's door: so every other detail of the layer stays the family's.
    """
    names = [name for name in INPUT_MAPS if isinstance(getattr(attention, name, None), nn.Linear)]
    if not names:
        raise UserError(
            f"this draft finds no query, key or value map in {type(attention).__name__}; use draft=mtp"
        )
    for name in names:
        setattr(attention, name, _widened(getattr(attention, name), embedding_scale))
    attention.register_forward_pre_hook(_join, with_kwargs=True)


def _widened(linear: nn.Linear, embedding_scale: float) -> nn.Linear:
    wide = nn.Linear(2 * linear.in_features, linear.out_features, bias=False, device="meta")
    weight = linear.weight.detach()
    wide.weight = nn.Parameter(torch.cat([embedding_scale * weight, weight], 1))
    wide.bias = linear.bias
    return wide


def _join(
    attention: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    assert not args, "a layer of transformers names its attention's arguments"
    beside = kwargs.pop("beside")
    return args, kwargs | {"hidden_states": torch.cat([beside, kwargs["hidden_states"]], -1)}
