"""Products with a frozen weight, rows @ weight.T, by the faster library of the machine.

torch gives float32 products on a CPU to MKL; oneDNN, which comes with torch as well, computes them up to half
faster, most of all where up to some hundred rows meet a head's large weight. torch offers it for inference only:
under gradients, on other devices, in other types and under autocast this is torch's own product. (A trained layer's
products, forward and back, gained 2 % in whole training steps, which is not worth spelling its gradients out.) It
gives up writing into memory at hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """[..., K] and [N, K] to [..., N]; on a CPU also in views of any strides."""
    cast = rows.dtype != weight.dtype or torch.is_autocast_enabled(weight.device.type)
    if torch.is_grad_enabled() or cast or not has_onednn(weight):
        return F.linear(rows, weight)
    return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")


def has_onednn(weight: Tensor) -> bool:
    """Whether oneDNN takes products with this weight."""
    offered = torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )
    return offered and weight.device.type == "cpu" and weight.dtype == torch.float32
