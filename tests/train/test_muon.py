"""Muon: orthogonal updates for matrices, AdamW for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtptrain.train.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (40, 40), (1, 16)])
def test_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    """Five iterations bring every singular value of a random matrix to about 1, whatever its scale, and keep
    the singular vectors."""
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    out = orthogonalise(matrix, 5)
    values = torch.linalg.svdvals(out)
    assert out.shape == shape and float(values.min()) > 0.3 and float(values.max()) < 1.25
    torch.testing.assert_close(out, orthogonalise(1e4 * matrix, 5), atol=1e-4, rtol=1e-3)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    rotated = u.T @ out @ v.T
    off = rotated - torch.diag(rotated.diagonal())
    assert float(off.abs().max()) < 1e-3 and bool((rotated.diagonal() > 0).all())


def test_a_matrix_moves_by_its_orthogonal_update() -> None:
    """Nesterov momentum of the first step, orthogonalised, times lr * sqrt(max(1, rows / columns)), after decay."""
    torch.manual_seed(0)
    p, start = nn.Parameter(torch.randn(32, 8)), torch.randn(32, 8)
    p.data.copy_(start)
    p.grad = torch.randn(32, 8)
    Muon([p], lr=0.1, weight_decay=0.5, steps=5).step()
    expected = start * (1 - 0.1 * 0.5) - 0.1 * 2.0 * orthogonalise(p.grad, 5)
    torch.testing.assert_close(p.data, expected, atol=1e-5, rtol=1e-4)


def test_other_parameters_are_adamws() -> None:
    """A norm's gain follows torch's AdamW at the scaled learning rate, step for step."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(9)) for _ in range(2))
    mine = Muon([ours], lr=0.1, other_lr_scale=0.2)
    adam = torch.optim.AdamW([theirs], lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(7):
        ours.grad = torch.randn(9)
        theirs.grad = ours.grad.clone()
        mine.step()
        adam.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_table_is_no_matrix() -> None:
    """A group of `matrices: False`, such as a vocabulary's head, moves as a norm's gain does."""
    torch.manual_seed(0)
    table, flat = nn.Parameter(torch.ones(6, 3)), nn.Parameter(torch.ones(18))
    mine = Muon([{"params": [table], "matrices": False}, {"params": [flat]}], lr=0.1)
    table.grad = torch.randn(6, 3)
    flat.grad = table.grad.flatten().clone()
    mine.step()
    assert torch.equal(table.flatten(), flat)


def test_its_state_survives_a_checkpoint() -> None:
    """Saved and loaded with weights only, the next steps are the same bits; what has no gradient stays."""
    import io

    torch.manual_seed(0)
    shapes = [(6, 4), (4,), (3, 3)]
    first, second = ([nn.Parameter(torch.ones(s)) for s in shapes] for _ in range(2))
    a, b = Muon(first, 0.1), Muon(second, 0.1)
    grads = [[torch.randn(s) for s in shapes[:2]] for _ in range(4)]
    for step, grad in enumerate(grads):
        if step == 2:
            kept = io.BytesIO()
            torch.save([p.data for p in first] + [a.state_dict()], kept)
            kept.seek(0)
            *values, state = torch.load(kept, weights_only=True)
            for p, value in zip(second, values, strict=True):
                p.data.copy_(value)
            b.load_state_dict(state)
        for params, optimizer in ((first, a), (second, b))[: 1 if step < 2 else 2]:
            for p, g in zip(params, grad, strict=False):
                p.grad = g.clone()
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    assert torch.equal(first[2], torch.ones(3, 3))
