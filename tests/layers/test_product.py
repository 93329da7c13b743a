"""The product is rows @ weight.T, whatever computes it."""

from __future__ import annotations

import pytest
import torch

from mtptrain.layers.product import has_onednn, product

SHAPES = [(1, 48, 33), (7, 48, 33), (300, 576, 1024), (5, 33, 1)]


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
@pytest.mark.parametrize("turned", [False, True])
def test_it_is_the_product_in_float64_also_of_views(
    rows: int, inner: int, columns: int, turned: bool
) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(rows, inner), torch.randn(columns, inner)
    if turned:
        a, b = a.T.contiguous().T, b.T.contiguous().T
    with torch.inference_mode():
        got = product(a, b)
    torch.testing.assert_close(got.double(), a.double() @ b.double().T, rtol=1e-4, atol=1e-4)


def test_a_block_of_rows_stays_a_block() -> None:
    a, b = torch.randn(2, 3, 8), torch.randn(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(product(a, b), a @ b.T)


def test_gradients_flow_where_they_are_asked_for() -> None:
    a, b = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8)
    product(a, b).sum().backward()
    torch.testing.assert_close(a.grad, b.sum(0).expand(4, -1))


def test_other_types_are_left_to_torch() -> None:
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    assert not has_onednn(b)
    with torch.no_grad():
        assert torch.equal(product(a, b), torch.nn.functional.linear(a, b))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert product(a.float(), b.float()).dtype == torch.bfloat16
