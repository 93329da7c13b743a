"""The contract of the shelf: every file is one loss, built by the recipe of its name."""

from __future__ import annotations

import ast
import pkgutil
from dataclasses import FrozenInstanceError, fields, is_dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

import mtptrain.losses
from mtptrain.compose import compose_config
from mtptrain.losses.base import Loss
from mtptrain.losses.base.chunks import compute
from mtptrain.losses.weighted_sum import WeightedSum

RECIPES = Path(__file__).parents[2] / "recipes" / "loss"
NO_LOSSES = ("base",)
KINDS = [m.name for m in pkgutil.iter_modules(mtptrain.losses.__path__) if m.name not in NO_LOSSES]
CHAINS = [path.stem for path in sorted(RECIPES.glob("*.yaml")) if path.stem not in KINDS]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_recipe = pytest.mark.parametrize("kind", KINDS + CHAINS)


def _recipe(kind: str) -> DictConfig:
    """As a command would compose it."""
    return compose_config("fit", [f"loss={kind}"]).loss


def _build(kind: str) -> Loss:
    return instantiate(_recipe(kind))


def test_recipes_and_files_match() -> None:
    """No file is without its recipe; a recipe without a file of its name only adds up losses of the shelf."""
    assert {path.stem for path in RECIPES.glob("*.yaml")} >= set(KINDS)
    for kind in CHAINS:
        loss = _build(kind)
        assert isinstance(loss, WeightedSum) and len(loss.summands()) > 1


@every_recipe
def test_recipe_builds_frozen_loss(kind: str) -> None:
    """The recipe builds the loss of its own file, a frozen dataclass whose every field it names."""
    loss = _build(kind)
    recipe = _recipe(kind)
    assert isinstance(loss, Loss) and is_dataclass(loss)
    own = "weighted_sum" if kind in CHAINS else kind
    assert type(loss).__module__ == f"mtptrain.losses.{own}"
    assert set(recipe) - {"_convert_"} == {"_target_", *(field.name for field in fields(loss))}
    with pytest.raises(FrozenInstanceError):
        setattr(loss, "eta", 0.0)  # noqa: B010, any name must be refused


@every_kind
def test_file_imports_only_base(kind: str) -> None:
    """Files on a shelf never import each other."""
    tree = ast.parse((Path(mtptrain.losses.__path__[0]) / f"{kind}.py").read_text())
    imports = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = {name for name in imports if name.startswith("mtptrain")}
    assert ours <= {"mtptrain.losses.base", "mtptrain.types"}


@every_recipe
def test_descent(kind: str) -> None:
    """Following the gradient brings any loss down from where it starts, steadily; a draft's confidence, where
    a loss asks for it, is read off its states."""
    torch.manual_seed(1)
    states = torch.randn(23, 11, requires_grad=True)
    target, head = torch.randn(23, 11), torch.randn(53, 11)
    labels, weights = torch.randint(0, 53, (23,)), torch.ones(23)
    loss, values = _build(kind), []
    optimizer = torch.optim.SGD([states], lr=0.02)
    for _ in range(20):
        optimizer.zero_grad()
        sums = compute(loss, states, target, labels, weights, head, confidence=states[:, 0])
        sums.loss.backward()
        optimizer.step()
        values.append(sums.loss.item())
    assert all(later < sooner for sooner, later in pairwise(values))
