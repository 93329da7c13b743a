"""Muon: momentum whose matrix update is orthogonalised; everything that is no matrix goes to AdamW, and so do
groups of `matrices: False`, where a row a token makes a matrix of a table (a vocabulary's head).

Newton-Schulz runs in the parameter's own precision: torch's own Muon casts to bf16, which a CPU multiplies
some 30 times slower. Update scale sqrt(max(1, rows / columns)) as in the method's reference (K. Jordan et
al., 2024). It gives up sharded matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic iteration of the reference


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """Nearest semi-orthogonal matrix to rounding of the iteration, [m, n] -> [m, n]."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Matrices by Muon, other parameters by AdamW at `lr * other_lr_scale`."""

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        steps: int = 5,
        other_lr_scale: float = 0.1,
    ) -> None:
        shared: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        shared |= {"steps": steps, "other_lr_scale": other_lr_scale, "matrices": True}
        super().__init__(params, shared)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                is_matrix = p.ndim == 2 and group["matrices"]
                if p.grad is not None:
                    (_step_matrix if is_matrix else _step_other)(p, group, self.state[p])
        return loss


def _step_matrix(p: Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
    assert p.grad is not None
    momentum = state.setdefault("momentum", torch.zeros_like(p))
    momentum.lerp_(p.grad, 1 - group["momentum"])
    update = orthogonalise(p.grad.lerp(momentum, group["momentum"]), group["steps"])
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def _step_other(p: Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
    assert p.grad is not None
    first = state.setdefault("first", torch.zeros_like(p))
    second = state.setdefault("second", torch.zeros_like(p))
    state["count"] = count = state.get("count", 0) + 1
    first.lerp_(p.grad, 0.1)
    second.lerp_(p.grad.square(), 0.05)
    scale = (second / (1 - 0.95**count)).sqrt_().add_(1e-8)
    p.addcdiv_(first, scale, value=-group["lr"] * group["other_lr_scale"] / (1 - 0.9**count))
