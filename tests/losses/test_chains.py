"""Losses over drafted chains against a plain loop, chain by chain and step by step, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtptrain.losses.base import VocabLoss
from mtptrain.losses.base.chunks import compute
from mtptrain.losses.d_pace import DPace
from mtptrain.losses.expected_length import ExpectedLength
from mtptrain.losses.tv import TV

H, V, ORIGINS = 11, 203, 13
STEP_ROWS = (13, 9, 0, 4)  # chains end early, and a step may have no row
Chain = dict[int, Tensor]  # step to a value of its row


def _layout() -> tuple[Tensor, Tensor]:
    """Origins of all rows, in no order within a step, and weights with holes in the middle of chains."""
    order = torch.Generator().manual_seed(5)
    names = 7 * torch.randperm(ORIGINS, generator=order) + 2
    alive, origins = names, []
    for rows in STEP_ROWS:
        alive = alive[torch.randperm(len(alive), generator=order)[:rows]] if rows else alive
        origins.append(alive[:rows])
    weights = torch.rand(sum(STEP_ROWS), generator=order) + 0.2
    weights[[3, 14, 20]] = 0  # steps 0, 1 and 1
    return torch.cat(origins), weights


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(11)
    rows = sum(STEP_ROWS)
    draft = torch.randn(rows, H, dtype=torch.float64)
    target = draft + 0.5 * torch.randn(rows, H, dtype=torch.float64)
    head = 0.7 * torch.randn(V, H, dtype=torch.float64)
    return draft.requires_grad_(), target, torch.randint(0, V, (rows,)), head


def _chains(origins: Tensor, weights: Tensor) -> list[dict[int, int]]:
    """The rows that count of every origin, by step."""
    chains: dict[int, dict[int, int]] = {}
    row = 0
    for step, rows in enumerate(STEP_ROWS):
        for _ in range(rows):
            if weights[row] > 0:
                chains.setdefault(int(origins[row]), {})[step] = row
            row += 1
    return list(chains.values())


def _expected_length(p: Tensor, q: Tensor, labels: Tensor, chain: dict[int, int]) -> Chain:
    losses, kept = {}, torch.ones((), dtype=torch.float64)
    for step in sorted(chain):
        row = chain[step]
        kept = kept * torch.minimum(p[row], q[row]).sum()
        losses[step] = 1 - kept
    return losses


def _d_pace(p: Tensor, q: Tensor, labels: Tensor, chain: dict[int, int]) -> Chain:
    steps, said = sorted(chain), {k: q[row, labels[row]] for k, row in chain.items()}
    losses = {}
    for j in steps:
        weight = 0.0
        for k in (k for k in steps if k >= j):
            reached = 1.0
            for i in (i for i in steps if i <= k):
                reached *= 0.3 + 0.7 * float(said[i].detach())
            weight += reached
        losses[j] = -weight * said[j].log()
    return losses


@pytest.mark.parametrize("chunk_rows", [3, 64])
@pytest.mark.parametrize(
    ("loss", "naive"), [(ExpectedLength(), _expected_length), (DPace(0.3), _d_pace)]
)
def test_value_and_gradient_chain_by_chain(loss: VocabLoss, naive: object, chunk_rows: int) -> None:
    """Per step, and under step weights of any kind, value and gradient are those of the loop: chains of all
    lengths, with rows of weight 0 in them."""
    assert callable(naive)
    origins, weights = _layout()
    decay = torch.tensor([1.0, 0.7, 0.3, 0.2], dtype=torch.float64)
    draft, target, labels, head = _inputs()
    p, q = (target @ head.T).softmax(-1), (draft @ head.T).softmax(-1)
    expected = [torch.zeros((), dtype=torch.float64) for _ in STEP_ROWS]
    for chain in _chains(origins, weights):
        for step, value in naive(p, q, labels, chain).items():
            expected[step] = expected[step] + weights[chain[step]].double() * value
    (decay * torch.stack(expected)).sum().backward()

    states = draft.detach().float().requires_grad_()
    rest = (target.float(), labels, weights, head.float())
    how = {"step_rows": STEP_ROWS, "origins": origins, "chunk_rows": chunk_rows}
    sums = compute(loss, states, *rest, **how)
    (decay.float() * sums.loss).sum().backward()
    torch.testing.assert_close(sums.loss.double(), torch.stack(expected), rtol=2e-5, atol=1e-6)
    assert states.grad is not None and draft.grad is not None
    torch.testing.assert_close(states.grad.double(), draft.grad, rtol=1e-4, atol=1e-6)


def test_expected_length_is_what_it_is_called() -> None:
    """Chains of n rows add up to n + 1 less their acceptance lengths 1 + sum_k a_0 ... a_k, and the gradient of
    step j is total variation's times sum_{k >= j} of that product without a_j."""
    draft, target, labels, head = (x.float() if x.is_floating_point() else x for x in _inputs())
    (states, target, labels), ones = (
        (x[:12] for x in (draft.detach(), target, labels)),
        torch.ones(12),
    )
    how = {"step_rows": (4, 4, 4), "origins": torch.arange(4).repeat(3)}
    states.requires_grad_()
    rows = [compute(TV(), states[[i]], target[[i]], labels[[i]], ones[:1], head) for i in range(12)]
    a = torch.stack([x.acceptance for x in rows]).view(3, 4)
    length = 1 + a[0] + a[0] * a[1] + a[0] * a[1] * a[2]
    sums = compute(ExpectedLength(), states, target, labels, ones, head, **how)
    torch.testing.assert_close(sums.loss.sum(), (3 + 1 - length).sum())

    first = 1 + a[1] + a[1] * a[2], a[0] * (1 + a[2]), a[0] * a[1]
    tv = torch.autograd.grad(torch.stack([x.loss for x in rows]).sum(), states)[0]
    got = torch.autograd.grad(sums.loss.sum(), states)[0]
    torch.testing.assert_close(got, tv * torch.cat(first).unsqueeze(1))


def test_a_chain_that_is_lost_at_once() -> None:
    """Where the first step is never accepted, nothing is nan, and only that step is taught."""
    head, ones = 60 * torch.eye(3), torch.ones(2)
    states = torch.tensor([[10.0, 0.0, 0.0], [0.0, 0.02, 0.0]], requires_grad=True)
    target = torch.tensor([[0.0, 10.0, 0.0], [0.02, 0.0, 0.0]])
    how = {"step_rows": (1, 1), "origins": torch.tensor([4, 4])}
    sums = compute(ExpectedLength(), states, target, torch.zeros(2).long(), ones, head, **how)
    sums.loss.sum().backward()
    assert sums.loss.tolist() == [1, 1] and states.grad is not None
    assert states.grad.isfinite().all() and not states.grad[1].any()
