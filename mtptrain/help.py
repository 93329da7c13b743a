"""What `mtptrain --help` prints, read from the recipes folder so that it cannot be out of date.

A file's first comment is its description, and a key with a comment on its line is a key to list;
the values shown are those of the composed default recipe. The YAML is read line by line for this:
its parser drops comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from mtptrain import __version__
from mtptrain.compose import compose_config, group_choices
from mtptrain.run import VERBS, recipes_dir

KEY = re.compile(r"^(?P<indent> *)(?P<name>\w+):.*?(?:\s# (?P<comment>.+))?$")
FLAGS = {
    "-m, --multirun": "run once for each of the values a,b,c",
    "--cfg job": "show the composed config and run nothing",
    "--config-dir FOLDER": "look for recipes in FOLDER as well",
    "--version": "show the version",
}


def help_text() -> str:
    """Verbs, recipes, groups, common keys with their defaults, and flags."""
    folder = recipes_dir()
    config = compose_config("compare", with_hydra=True)  # it has the keys of every verb
    choices: Mapping[str, str] = config.hydra.runtime.choices
    return "\n".join(
        [
            f"mtptrain {__version__}: a draft head for your model, and its acceptance length",
            "",
            "usage: mtptrain VERB [recipe=NAME] [group=choice] [key=value] [-m]",
            "       mtptrain inspect data [recipe=NAME] [key=value] | inspect cache PATH",
            *_section("verbs", {verb: _description(folder / f"{verb}.yaml") for verb in VERBS}),
            *_section("recipes", _recipes(folder)),
            *_section("groups, the default first", _groups(folder, choices)),
            *_section("keys", _common_keys(folder, config, choices)),
            *_section("flags", FLAGS),
        ]
    )


def _section(title: str, rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows))
    return ["", title, *(f"  {name:<{width}}  {text}".rstrip() for name, text in rows.items())]


def _description(file: Path) -> str:
    comments = (line[2:].strip() for line in file.read_text().splitlines() if line.startswith("# "))
    return next((text for text in comments if not text.startswith("@package")), "")


def _recipes(folder: Path) -> dict[str, str]:
    names = group_choices([folder]).get("recipe", [])
    return {f"recipe={name}": _description(folder / "recipe" / f"{name}.yaml") for name in names}


def _groups(folder: Path, chosen: Mapping[str, str]) -> dict[str, str]:
    rows = {}
    for group, names in group_choices([folder]).items():
        default = [name for name in names if name == chosen.get(group)]
        if group != "recipe":
            rows[f"{group}="] = ", ".join(default + [name for name in names if name not in default])
    return rows


def _common_keys(folder: Path, config: DictConfig, chosen: Mapping[str, str]) -> dict[str, str]:
    target = folder / "target" / f"{chosen['target']}.yaml"
    files = [("", folder / "base.yaml"), ("target.", target), ("", folder / "compare.yaml")]
    rows = {}
    for prefix, file in files:
        for key, comment in _commented_keys(file.read_text()):
            value = OmegaConf.select(config, f"{prefix}{key}")
            rows[f"{prefix}{key}={value}"] = comment
    return rows


def _commented_keys(text: str) -> Iterator[tuple[str, str]]:
    """Dotted keys, of at most two levels, that have a comment on their line."""
    parent = ""
    for line in filter(None, map(KEY.match, text.splitlines())):
        name = line["name"]
        parent = parent if line["indent"] else name
        if line["comment"]:
            yield (f"{parent}.{name}" if line["indent"] else name), line["comment"]
