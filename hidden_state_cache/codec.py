"""Feature rows to stored rows and back.

bf16, fp16 and fp32 are casts. int8 and fp8 (e4m3) are symmetric with one float32 scale per row and
tap: taps differ in magnitude by orders, and one scale for all would spend the small tap's bits on
the large one. A scale per row costs 4 bytes, 0.7 % of an int8 row of width 576. Given up: clipping
or error-minimising scales, since residual streams carry a few huge channels that a head reads and
that must not be clipped.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

RowDtype = Literal["bf16", "fp16", "fp32", "int8", "fp8"]
ROW_DTYPES: tuple[RowDtype, ...] = get_args(RowDtype)

TORCH_DTYPES: dict[RowDtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
# Largest stored magnitude of the scaled kinds.
_LARGEST: dict[RowDtype, float] = {"int8": 127.0, "fp8": 448.0}
SCALED = frozenset(_LARGEST)
# Infinite or NaN iff all exponent bits are set (e4m3fn: NaN iff all bits but the sign are).
_EXPONENT = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
}


def encode(
    features: Tensor, dtype: RowDtype, widths: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """Rows to be stored, and their scales for int8 and fp8.

    features [T, W] of any float dtype and device, W = sum(widths) → rows [T, W], scales [T, L]
    float32 or None, both on the CPU. int8 is off by at most half a scale (absmax / 254 of the row's
    tap), fp8 by at most 1/16 of the value or half the smallest e4m3 step (2⁻¹⁰ scales).
    """
    if dtype not in _LARGEST:
        return features.detach().to("cpu", TORCH_DTYPES[dtype]), None
    parts = [_quantise(tap, dtype) for tap in features.detach().float().split_with_sizes(widths, 1)]
    rows = torch.cat([rows for rows, _ in parts], dim=1)  # [T, W]
    return rows.cpu(), torch.cat([scale for _, scale in parts], dim=1).cpu()  # [T, L]


def _quantise(tap: Tensor, dtype: RowDtype) -> tuple[Tensor, Tensor]:
    # A row of zeros gets a tiny scale, not 0: it is stored as zeros and nothing is divided by 0.
    scale = tap.abs().amax(dim=1, keepdim=True) / _LARGEST[dtype]  # [T, 1]
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    scaled = tap / scale  # [T, width]
    if dtype == "int8":
        scaled = scaled.round().clamp(-127, 127)
    return scaled.to(TORCH_DTYPES[dtype]), scale


def decode(rows: Tensor, scales: Tensor | None, widths: tuple[int, ...]) -> Tensor:
    """Features, always a copy: rows [T, W], scales [T, L] or None → [T, W] float32."""
    features = rows.to(torch.float32, copy=True)  # [T, W]
    if scales is None:
        return features
    if len(set(widths)) == 1:  # the usual case, in one operation for all taps
        features.view(-1, len(widths), widths[0]).mul_(scales.unsqueeze(2))
    else:
        for column, tap in enumerate(features.split_with_sizes(widths, 1)):  # views
            tap.mul_(scales[:, column : column + 1])
    return features


def finite_rows(rows: Tensor, scales: Tensor | None) -> Tensor:
    """Which stored rows are finite, by their bits: rows [T, W], scales [T, L] → [T] bool."""
    finite = _finite(rows)
    return finite if scales is None else finite & _finite(scales)


def all_finite(data: memoryview, kind: torch.dtype) -> bool:
    """Whether no value of this kind in these bytes is infinite or NaN, by their bits; half a value is not finite."""
    if kind not in _EXPONENT or not len(data):
        return True
    bits, exponent = _EXPONENT[kind]
    if len(data) % bits.itemsize:
        return False
    return int(torch.frombuffer(data, dtype=bits).bitwise_and(exponent).amax()) < exponent


def _finite(values: Tensor) -> Tensor:
    if values.dtype not in _EXPONENT:  # integers
        return torch.ones(values.shape[0], dtype=torch.bool)
    kind, exponent = _EXPONENT[values.dtype]
    return values.view(kind).bitwise_and(exponent).amax(dim=1) < exponent
