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


def input_norm(layer: nn.Module) -> nn.Module:
    """What a decoder layer norms its attention's input with; the identity where the family norms outputs instead
    (OLMo 2, EXAONE 4)."""
    norm = getattr(layer, "input_layernorm", None)
    return nn.Identity() if norm is None else norm


def leave_keys(
    layer: nn.Module,
    normed: Tensor,
    rotary: tuple[Tensor, Tensor],
    ctx: ForwardContext,
    beside: Tensor | None = None,
) -> None:
    """Runs of a decoder layer only what leaves keys and values, of rows [T, H] that are as its attention reads
    them and whose context asks for no more. `beside` is handed to the attention."""
    more = {} if beside is None else {"beside": beside}
    layer.get_submodule("self_attn")(
        hidden_states=normed[None],
        position_embeddings=rotary,
        attention_mask=None,
        ctx=ctx,
        **more,
    )


def states_of(out: Any) -> Tensor:
    """[T, H] states of a decoder layer's output, which is [1, T, H] or a tuple that begins with it."""
    return (out[0] if isinstance(out, tuple) else out)[0]
