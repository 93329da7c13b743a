"""A fused gated MLP is the same map, under the same names, and its copy is the network's own module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mtptrain.layers.gated_mlp import GatedMLP, fuse_gated_mlps
from mtptrain.layers.packed_linear import pack_linears


class MLP(nn.Module):
    def __init__(self, bias: bool = False, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(24, 56, bias), nn.Linear(24, 56, bias)
        self.down_proj = nn.Linear(56, 24, bias)
        self.act_fn = activation or nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def network(mlp: nn.Module) -> nn.Sequential:
    """A network that holds `mlp` as its second module, prepared as a target is."""
    holder = nn.Sequential(nn.Identity(), mlp).requires_grad_(False)
    pack_linears(holder)
    fuse_gated_mlps(holder)
    return holder


@pytest.mark.parametrize("rows", [1, 7, 256, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_what_the_plain_module_computes(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = MLP(bias)
    x = 3 * torch.randn(1, rows, 24)
    with torch.inference_mode():
        want = plain(x)
        fused = network(plain)[1]
        assert type(fused) is GatedMLP
        torch.testing.assert_close(fused(x), want)


def test_it_shares_the_parameters_and_their_names() -> None:
    plain = MLP()
    want = plain.state_dict(keep_vars=True)
    got = network(plain)[1].state_dict(keep_vars=True)
    assert got.keys() == want.keys() and all(got[name] is want[name] for name in want)


def test_a_copy_is_an_ordinary_trainable_module() -> None:
    fused = network(MLP())[1]
    copied = copy.deepcopy(fused)
    assert type(copied) is MLP and type(copied.up_proj) is nn.Linear
    copied.requires_grad_(True)(torch.randn(2, 24)).sum().backward()
    assert all(p.grad is not None for p in copied.parameters())
    assert all(p.grad is None for p in fused.parameters())


def test_gradients_flow_through_to_the_input() -> None:
    torch.manual_seed(0)
    plain = MLP().requires_grad_(False)
    x = torch.randn(2, 24, requires_grad=True)
    want = torch.autograd.grad(plain(x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(network(plain)(x).sum(), x), want)


class Clamped(MLP):
    """A gated MLP with a step more than the fused one computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-0.01, 0.01)


class Experts(nn.Module):
    """The same names, as several families have them for their experts: weights, no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Parameter(torch.randn(4, 56, 24)) for _ in range(2))
        self.down_proj = nn.Parameter(torch.randn(4, 24, 56))


@pytest.mark.parametrize(
    "mlp", [MLP(activation=nn.GELU()), Clamped(), nn.Linear(24, 24), Experts()]
)
def test_anything_else_stays(mlp: nn.Module) -> None:
    assert not any(isinstance(m, GatedMLP) for m in network(mlp).modules())
