"""A packed linear map is the same map, and its copy is an ordinary layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mtptrain.layers.packed_linear import PackedLinear, pack_linears


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 33).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 7, 256, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_what_the_plain_layer_computes(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 33, bias).requires_grad_(False)
    x = torch.randn(1, rows, 48)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(x), plain(x))


def test_it_shares_the_parameters_and_their_names(layer: nn.Linear) -> None:
    packed = PackedLinear(layer)
    assert packed.weight is layer.weight and packed.bias is layer.bias
    assert packed.state_dict().keys() == layer.state_dict().keys()


def test_a_copy_is_an_ordinary_trainable_layer(layer: nn.Linear) -> None:
    copied = copy.deepcopy(PackedLinear(layer))
    assert type(copied) is nn.Linear and torch.equal(copied.weight, layer.weight)
    copied.requires_grad_(True)(torch.randn(2, 48)).sum().backward()
    assert copied.weight.grad is not None


def test_gradients_flow_through_to_the_input(layer: nn.Linear) -> None:
    x = torch.randn(2, 48, requires_grad=True)
    PackedLinear(layer)(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, -1))


def test_every_linear_map_of_a_network_is_packed_and_others_stay(layer: nn.Linear) -> None:
    half = nn.Linear(4, 4, dtype=torch.bfloat16)
    network = nn.Sequential(nn.Sequential(layer, nn.ReLU()), half)
    pack_linears(network)
    assert isinstance(network[0][0], PackedLinear)  # pyright: ignore[reportIndexIssue]
    assert type(network[0][1]) is nn.ReLU and network[1] is half  # pyright: ignore[reportIndexIssue]
