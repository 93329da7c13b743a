"""What the rows of one drafted token hand to a decoder layer, and what the layer hands back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mtptrain.attention_backends.base import ForwardContext


@dataclass(frozen=True, eq=False)
class StepRows:
    """What T rows read at one step."""

    embedding: Tensor  # [T, H] of each row's next token
    state: Tensor  # [T, H] what the row gave before, or its features
    rotary: tuple[Tensor, Tensor]  # at each row's position
    ctx: ForwardContext


def leave_keys(layer: nn.Module, x: Tensor, rows: StepRows, beside: Tensor | None = None) -> Tensor:
    """Runs of a decoder layer only what leaves the keys and values of `x` [T, H], for rows whose context asks for
    no more; returns `x`. `beside` is handed to the attention."""
    more = {} if beside is None else {"beside": beside}
    layer.get_submodule("self_attn")(
        hidden_states=layer.get_submodule("input_layernorm")(x)[None],
        position_embeddings=rows.rotary,
        attention_mask=None,
        ctx=rows.ctx,
        **more,
    )
    return x


def states_of(out: Any) -> Tensor:
    """[T, H] states of a decoder layer's output, which is [1, T, H] or a tuple that begins with it."""
    return (out[0] if isinstance(out, tuple) else out)[0]
