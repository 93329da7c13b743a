"""Losses added up: the sums of their parts, from one pass; recipes that name them; mistakes in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor

from mtptrain.compose import compose_config
from mtptrain.layers.product import product
from mtptrain.losses.base import Loss, walk
from mtptrain.losses.base.chunks import compute
from mtptrain.losses.cross_entropy import CrossEntropy
from mtptrain.losses.expected_length import ExpectedLength
from mtptrain.losses.kl import KL
from mtptrain.losses.lk import LK
from mtptrain.losses.smooth_l1 import SmoothL1
from mtptrain.losses.tv import TV
from mtptrain.losses.weighted_sum import WeightedSum
from mtptrain.overrides import check, search_path
from mtptrain.types import UserError

R, H, V = 37, 9, 101


def _inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    weights = torch.rand(R)
    weights[::5] = 0
    states = torch.randn(R, H, requires_grad=True)
    return states, torch.randn(R, H), torch.randint(0, V, (R,)), weights, torch.randn(V, H)


def test_value_and_gradient_are_the_weighted_sums_of_the_parts() -> None:
    """Of losses with one term, with two, over chains and on states, per step, sums of sums included."""
    parts: dict[str, Loss] = {
        "lk": LK(),
        "states": SmoothL1(),
        "chain": ExpectedLength(),
        "more": WeightedSum({"kl": KL(), "ce": CrossEntropy()}, {"kl": 0.5, "ce": 2.0}),
        "unused": TV(),
    }
    loss = WeightedSum(parts, {"lk": 0.3, "states": 1.0, "chain": 0.7, "more": 0.1, "unused": 0})
    states, *rest = _inputs()
    how: dict[str, Any] = {"step_rows": (20, 17), "origins": torch.arange(R) % 20, "chunk_rows": 8}
    alone = [(0.3, LK()), (1.0, SmoothL1()), (0.7, ExpectedLength()), (0.05, KL())]
    expected = [w * compute(part, states, *rest, **how).loss for w, part in alone]
    expected.append(0.2 * compute(CrossEntropy(), states, *rest, **how).loss)
    together = compute(loss, states, *rest, **how)
    wanted, steps = torch.stack(expected).sum(0), torch.tensor([1.0, 0.4])
    torch.testing.assert_close(together.loss, wanted)
    got, want = (torch.autograd.grad((steps * x).sum(), states)[0] for x in (together.loss, wanted))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_counters_and_labels() -> None:
    """Counters are those of any vocabulary loss; one part that needs labels takes unlabelled rows from all."""
    states, target, labels, weights, head = _inputs()
    labels[::3] = -1
    loss = WeightedSum({"a": SmoothL1(), "b": CrossEntropy()}, {"a": 1.0, "b": 0.1})
    sums = compute(loss, states, target, labels, weights, head)
    alone = compute(KL(), states, target, labels, weights * (labels >= 0), head)
    for name in ("count", "acceptance", "agreement"):
        torch.testing.assert_close(getattr(sums, name), getattr(alone, name))


def test_the_head_runs_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three vocabulary losses take no more forward passes through the head than one."""
    calls = list[tuple[int, ...]]()

    def counted(rows: Tensor, weight: Tensor) -> Tensor:
        if weight.shape[0] > weight.shape[1]:  # not the way back
            calls.append(tuple(rows.shape))
        return product(rows, weight)

    monkeypatch.setattr(walk, "product", counted)
    three: dict[str, Loss] = {"a": KL(), "b": TV(), "c": CrossEntropy()}
    compute(KL(), *_inputs(), chunk_rows=8)
    one = list(calls)
    compute(WeightedSum(three, {"a": 1.0, "b": 1.0, "c": 1.0}), *_inputs(), chunk_rows=8)
    assert calls == one + one and one


def test_eagle_is_its_published_sum() -> None:
    """1.0 smooth L1 on states + 0.1 soft cross-entropy; the entropy of p is a constant that KL leaves out."""
    states, target, labels, weights, head = _inputs()
    loss = instantiate(compose_config("fit", ["loss=eagle"]).loss)
    sums = compute(loss, states, target, labels, weights, head)
    got = torch.autograd.grad(sums.loss, states)[0]
    value = torch.nn.functional.smooth_l1_loss(states, target, reduction="none").mean(-1)
    p, log_q = (target @ head.T).softmax(-1), (states @ head.T).log_softmax(-1)
    expected = (weights * (value - 0.1 * (p * log_q).sum(-1))).sum()
    torch.testing.assert_close(got, torch.autograd.grad(expected, states)[0], rtol=1e-4, atol=1e-6)


def test_a_command_line_composes_losses() -> None:
    """What the file's opening shows passes the checks and builds what it says, settings of parts included."""
    words = [
        "loss=weighted_sum",
        "loss.weights.cross_entropy=0",
        "+loss@loss.parts.lk=lk",
        "+loss.weights.lk=0.5",
        "loss.parts.lk.eta=2",
    ]
    check("fit", words)
    loss = instantiate(compose_config("fit", words).loss)
    assert loss.summands() == ((1.0, KL()), (0.5, LK(eta=2)))


def test_a_recipe_of_ones_own_composes_losses(tmp_path: Path) -> None:
    """Parts come from the group `loss` by name, in a recipe as on the command line."""
    text = """# @package _global_
defaults:
  - /loss@loss.parts.tv: tv
  - override /loss: weighted_sum
recipe: own
loss:
  weights: {kl: 2.0, cross_entropy: 0.0, tv: 0.5}
"""
    file = tmp_path / "recipe" / "own.yaml"
    file.parent.mkdir()
    file.write_text(text)
    check("fit", ["recipe=own"], folder=tmp_path)
    loss = instantiate(compose_config("fit", [*search_path(tmp_path), "recipe=own"]).loss)
    assert loss.summands() == ((2.0, KL()), (0.5, TV()))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, r"loss.parts.kl has no weight: add \+loss.weights.kl=1"),
        ({"kl": 1.0, "tv": 1.0}, r"loss.weights.tv has no loss: add \+loss@loss.parts.tv=NAME"),
        ({"kl": -1.0}, "loss.weights.kl is -1.0: give a number of at least 0"),
        ({"kl": float("nan")}, "loss.weights.kl is nan: give a number of at least 0"),
        ({"kl": 0.0}, "loss.weights are all 0: give one of them a number above 0"),
    ],
)
def test_mistakes_are_one_line(weights: dict[str, float], message: str) -> None:
    """Each names the key and what to do."""
    with pytest.raises(UserError, match=f"^{message}"):
        WeightedSum({"kl": KL()}, weights)
