"""A frozen gated MLP (Llama's: down(silu(gate(x)) * up(x))) without passes of its own over memory.

Applying SiLU and the product apart reads and writes the widest rows of the network four times more; oneDNN applies
both to a tile of its matrix product while that lies in the cache. As with `PackedLinear`, inference only: under
gradients, and in a copy, it is the network's own module. It gives up other activations: their MLP stays as it is.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from mtptrain.layers.packed_linear import PackedLinear

MAPS = ("gate_proj", "up_proj", "down_proj")


class GatedMLP(nn.Module):
    """Computes what `mlp` computes and shares its parameters and their names."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.plain = (mlp,)  # in a tuple: its parameters are registered once, under their own names
        self.gate_proj, self.up_proj, self.down_proj = (_packed(mlp, name) for name in MAPS)

    def forward(self, input: Tensor) -> Tensor:  # [..., H] -> [..., H]
        if torch.is_grad_enabled():
            return self.plain[0](input)
        gate, up = self.gate_proj, self.up_proj
        linear = torch.ops.mkldnn._linear_pointwise
        gated = linear(input, gate.packed, gate.bias, "swish", [], "")
        gated = linear.binary(input, gated, up.packed, up.bias, "mul")
        return self.down_proj(gated)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return deepcopy(self.plain[0], memo)


def fuse_gated_mlps(module: nn.Module) -> None:
    """Replaces every gated MLP inside `module` whose maps are packed and which computes just this; others stay."""
    for name, child in module.named_children():
        if _can_fuse(child):
            setattr(module, name, GatedMLP(child))
        else:
            fuse_gated_mlps(child)


def _can_fuse(mlp: nn.Module) -> bool:
    maps = [getattr(mlp, name, None) for name in MAPS]  # of experts: bare parameters
    return all(isinstance(m, PackedLinear) for m in maps) and _same(mlp)


@torch.inference_mode()
def _same(mlp: nn.Module) -> bool:
    """Whether the fused map gives what this module computes; its code may clamp, scale or use another activation."""
    probe = torch.linspace(-4, 4, 4 * _packed(mlp, "gate_proj").in_features).view(4, -1)
    want = mlp(probe)
    return torch.allclose(
        GatedMLP(mlp)(probe), want, rtol=1e-3, atol=1e-4 * float(want.abs().max())
    )


def _packed(mlp: nn.Module, name: str) -> PackedLinear:
    packed = mlp.get_submodule(name)
    assert isinstance(packed, PackedLinear)
    return packed
