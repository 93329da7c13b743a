"""A frozen linear map whose weight is laid out once for the CPU's matrix kernels.

Few rows meet a large weight in every decode step, and a general matrix product lays the weight out anew at
each call, which costs the more the fewer the rows; oneDNN's own layout is made once, here. torch
offers the operation for inference only, so a copy of the module is an ordinary, trainable layer again. It
gives up memory: the weight is held in both layouts.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from mtptrain.layers.product import has_onednn

ROWS = 256  # the number of rows that the layout is chosen for


class PackedLinear(nn.Linear):
    """Computes what `linear` computes and shares its parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), ROWS)

    def forward(self, input: Tensor) -> Tensor:  # [..., in] -> [..., out]
        if torch.is_grad_enabled():
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight, plain.bias = deepcopy(self.weight, memo), deepcopy(self.bias, memo)
        return plain


def pack_linears(module: nn.Module) -> None:
    """Replaces every fp32 linear map inside `module` that lies on a CPU with oneDNN; others stay."""
    for name, child in module.named_children():
        if type(child) is not nn.Linear:
            pack_linears(child)
        elif has_onednn(child.weight):
            setattr(module, name, PackedLinear(child))
