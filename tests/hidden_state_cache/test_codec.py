"""Stored rows give back what the docstring of `encode` promises."""

from __future__ import annotations

import pytest
import torch

from hidden_state_cache.codec import RowDtype, decode, encode, finite_rows

WIDTHS = (8, 5)


def rows() -> torch.Tensor:
    """Rows [64, 13] of which the first tap is a million times the second, one of them all zeros."""
    features = torch.randn(64, 13, generator=torch.Generator().manual_seed(0))
    features[:, :8] *= 1e6
    features[7] = 0
    return features


def test_int8_is_off_by_half_a_scale_of_its_own_tap() -> None:
    """int8 rows differ by at most absmax / 254 of the row's tap, whatever the other tap's size."""
    features = rows()
    stored, scales = encode(features, "int8", WIDTHS)
    assert stored.dtype == torch.int8 and scales is not None and scales.shape == (64, 2)
    error = (decode(stored, scales, WIDTHS) - features).abs()
    for part, wrong in zip(features.split(WIDTHS, 1), error.split(WIDTHS, 1), strict=True):
        assert (wrong <= part.abs().amax(1, keepdim=True) / 254 * 1.0001).all()


def test_fp8_is_off_by_a_sixteenth_of_the_value() -> None:
    """fp8 rows differ by at most 1/16 of a value, or half the smallest step of the tap's scale."""
    features = rows()
    stored, scales = encode(features, "fp8", WIDTHS)
    assert stored.dtype == torch.float8_e4m3fn and scales is not None
    error = (decode(stored, scales, WIDTHS) - features).abs()
    step = torch.cat([scales[:, :1].expand(-1, 8), scales[:, 1:].expand(-1, 5)], 1) / 1024
    assert (error <= torch.maximum(features.abs() / 16, step) * 1.0001).all()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_taps_of_one_width_are_scaled_alike(dtype: RowDtype) -> None:
    """Taps of equal width decode to what each of them would alone."""
    features = rows()[:, :12]
    whole = decode(*encode(features, dtype, (6, 6)), (6, 6))
    parts = [decode(*encode(part, dtype, (6,)), (6,)) for part in features.split(6, dim=1)]
    assert torch.equal(whole, torch.cat(parts, 1))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "int8", "fp8"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_found(dtype: RowDtype, wrong: float) -> None:
    """`finite_rows` is False for exactly the row that held a NaN or an infinity."""
    features = rows() / 1e3  # within fp16
    features[5, 11] = wrong
    finite = finite_rows(*encode(features, dtype, WIDTHS))
    assert (~finite).nonzero().flatten().tolist() == [5]


def test_int8_takes_half_the_bytes_of_bf16() -> None:
    """At width 576 an int8 row with its scale takes at most 0.52 of a bf16 row."""
    features = torch.randn(3, 576, generator=torch.Generator().manual_seed(0))
    plain, _ = encode(features, "bf16", (576,))
    stored, scales = encode(features, "int8", (576,))
    assert scales is not None and stored.nbytes + scales.nbytes <= 0.52 * plain.nbytes
