"""Composes a verb's config from the recipes, and lists what the recipes folder offers.

The one place that calls Hydra's compose API, so that the command line, tests and tools get the same
config from the same words. Groups are listed from the folders themselves: Hydra can list them only
after a composition that a mistyped name would already have broken. It imports no torch: `mtptrain
--help` comes through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from mtptrain.run import recipes_dir

HYDRA_VERSION_BASE = "1.3"


def compose_config(
    verb: str, overrides: Sequence[str] = (), *, with_hydra: bool = False
) -> DictConfig:
    """The config of `mtptrain VERB OVERRIDES`, with Hydra's own node only where asked for.

    Raises Hydra's and OmegaConf's own exceptions; `overrides.check` turns them into a UserError.
    """
    with initialize_config_dir(str(recipes_dir()), version_base=HYDRA_VERSION_BASE):
        return compose(verb, list(overrides), return_hydra_config=with_hydra)


def compose_beside(verb: str, overrides: Sequence[str]) -> DictConfig:
    """The same, also inside a command: among the recipes of that command, its `--config-dir` included."""
    if not GlobalHydra.instance().is_initialized():
        return compose_config(verb, overrides)
    words = HydraConfig.get().overrides.hydra if HydraConfig.initialized() else []
    return compose(verb, [*overrides, *(w for w in words if w.startswith("hydra.searchpath="))])


def group_choices(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Every group (`draft`, `recipe`, ...) in the folders and its choices, both sorted."""
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/**/*.yaml"):
            group = file.parent.relative_to(folder).as_posix()
            groups.setdefault(group, set()).add(file.stem)
    return {group: sorted(groups[group]) for group in sorted(groups)}


def flat_keys(config: DictConfig) -> dict[str, object]:
    """Every dotted key, inner nodes too, with its value as written: references stay unresolved."""
    keys: dict[str, object] = {}
    _flatten(OmegaConf.to_container(config, resolve=False), "", keys)
    return keys


def _flatten(node: object, prefix: str, keys: dict[str, object]) -> None:
    if isinstance(node, dict):
        for name, value in node.items():
            keys[f"{prefix}{name}"] = value
            _flatten(value, f"{prefix}{name}.", keys)
