"""Finds the mistakes in a command line before anything runs, and says each in one line.

Hydra's own messages are several lines long and suggest no names, and `batch_size=abc` passes it by.
So the overrides are parsed with Hydra's parser and held against the composed recipe: groups and
choices, keys, kinds of values; then the whole is composed once, as Hydra will do again. In a sweep
every value is checked by itself, but only the first combination is composed here: Hydra composes
the others before it starts the first job. Keys added with `+` are the user's own and not checked.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtptrain.compose import compose_config, flat_keys, group_choices
from mtptrain.ranges import check_ranges
from mtptrain.run import recipes_dir
from mtptrain.types import UserError

# The last three are Hydra's way with what its own grammar lets through, such as `~loss=3`.
COMPOSITION_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    ValueError,
    AssertionError,
    RecursionError,
)


def check(
    verb: str, arguments: Sequence[str], *, sweep: bool = False, folder: Path | None = None
) -> list[str]:
    """Raises UserError at the first mistake in `VERB ARGUMENTS`; returns the keys swept over.

    `folder` is a second recipes folder, the user's own. With `sweep`, values may be lists `a,b`.
    """
    folders = [recipes_dir(), *([folder] if folder else [])]
    where = search_path(folder)
    overrides = [_parse(argument) for argument in arguments]
    groups = group_choices(folders)
    chosen = [item for item in overrides if item.key_or_group in groups]
    for item in overrides:
        _check_sweep(item, sweep)
    for item in chosen:
        _check_choice(item, groups[item.key_or_group])
    keys = flat_keys(_compose(verb, [*where, *_single(chosen)]))
    for item in overrides:
        _check_key(item, keys, groups)
    whole = _compose(verb, [*where, *_single(overrides)], with_hydra=True)
    _check_whole(whole)
    if verb == "compare":
        _check_drafts(whole, groups["draft"], folder)
    return [item.key_or_group for item in overrides if item.is_sweep_override()]


def search_path(folder: Path | None) -> list[str]:
    """The override that makes Hydra look for recipes in `folder` as well."""
    if folder is None:
        return []
    quoted = str(folder.absolute()).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['{quoted}']"]


def nearest(name: str, known: Iterable[str]) -> str:
    """`: did you mean a, b?` with the known names most like `name`; empty where none is."""
    known = list(known)
    found = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if not found:  # a key without its prefix: learning_rate for train.learning_rate
        last = name.rpartition(".")[2]
        tails = {key.rpartition(".")[2] for key in known}
        close = difflib.get_close_matches(last, tails, n=1, cutoff=0.8)
        found = [key for key in known if key.rpartition(".")[2] in close][:3]
    return f": did you mean {', '.join(found)}?" if found else ""


def one_line(error: BaseException) -> str:
    """The error's message without its line breaks, its cause's first line after it."""
    first = str(error).strip().partition("\n")[0].rstrip(".:")
    cause = str(error.__cause__ or "").strip().partition("\n")[0]
    return " ".join(": ".join(part for part in (first, cause) if part).split())


def _parse(argument: str) -> Override:
    if "=" not in argument and not argument.startswith("~"):
        raise UserError(f"cannot read {argument!r}: write key=value, for example batch_size=8")
    try:
        override = OverridesParser.create().parse_override(argument)
        if not override.key_or_group:
            raise HydraException("no key")
        return override
    except HydraException:
        raise UserError(
            f"cannot read {argument!r}: write key=value, and a value with special characters in "
            f"two pairs of quotes, as in data.path=\"'my file.jsonl'\""
        ) from None


def _check_sweep(item: Override, sweep: bool) -> None:
    if item.is_sweep_override() and not sweep:
        raise UserError(
            f"{item.input_line} gives several values: add -m to run once for each, "
            f"or write {item.key_or_group}=[...] for a list"
        )


def _check_choice(item: Override, choices: list[str]) -> None:
    for value in _values(item):
        if value not in choices:
            raise UserError(
                f"unknown {item.key_or_group} {value!r}{nearest(str(value), choices)} "
                f"({item.key_or_group}= takes {', '.join(choices)})"
            )


def _check_key(item: Override, keys: dict[str, object], groups: Iterable[str]) -> None:
    name = item.key_or_group
    if name in groups or item.is_hydra_override() or item.is_delete() or item.is_add():
        return
    if name in keys:
        for value in _values(item):
            _check_kind(name, value, keys[name])
    elif not item.is_force_add():
        names = [*groups, *(key for key in keys if not key.endswith("_target_"))]
        hint = nearest(name, names) or "; `mtptrain --help` lists the keys"
        raise UserError(f"unknown key {name!r} in {item.input_line}{hint}")


def _check_kind(name: str, value: object, default: object) -> None:
    """The value must be of its default's kind; null, ??? and a reference say nothing of a kind."""
    kinds: dict[type, tuple[str, tuple[type, ...]]] = {
        bool: ("true or false", (bool,)),
        int: ("a whole number", (int,)),
        float: ("a number", (int, float)),
        str: ("text", (str, int, float, bool, type(None))),
        list: ("a list, as in [a,b]", (list, type(None))),
        dict: ("a mapping, as in {a: 1}", (dict, type(None))),
    }
    if default is None or any(isinstance(text, str) and "${" in text for text in (value, default)):
        return
    kind, allowed = kinds[type(default)]
    is_number_of_bool = isinstance(value, bool) and bool not in allowed  # bool is an int to Python
    if default != "???" and (is_number_of_bool or not isinstance(value, allowed)):
        shown = "null" if value is None else repr(value)
        raise UserError(f"{name} must be {kind} (its default is {default}), not {shown}")


def _is_listed(item: Override) -> bool:
    """False for a sweep over a pattern or an interval, whose values only the sweeper knows."""
    listed = (ValueType.SIMPLE_CHOICE_SWEEP, ValueType.CHOICE_SWEEP, ValueType.RANGE_SWEEP)
    return not item.is_sweep_override() or item.value_type in listed


def _values(item: Override) -> list[object]:
    """The value, or all the values of a sweep."""
    if item.is_delete() or not _is_listed(item):
        return []
    if not item.is_sweep_override():
        return [item.value()]
    return [
        getattr(value, "text", value) for value in item.sweep_iterator()
    ]  # text of a quoted one


def _single(items: Iterable[Override]) -> list[str]:
    """The overrides as typed; of a sweep, with the first of its values."""
    return [
        f"{item.get_key_element()}={next(iter(item.sweep_string_iterator()))}"
        if item.is_sweep_override()
        else str(item.input_line)
        for item in items
        if _is_listed(item)
    ]


def _compose(verb: str, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    try:
        return compose_config(verb, overrides, with_hydra=with_hydra)
    except COMPOSITION_ERRORS as error:
        raise UserError(f"the recipe does not compose: {one_line(error)}") from error


def _check_drafts(config: DictConfig, choices: list[str], folder: Path | None) -> None:
    """`drafts` and `compare.own` name drafts; an entry that chooses its own may have any name. What each is given
    is held to the rules of a command for it alone."""
    own = {str(name): [str(w) for w in words] for name, words in config.compare.own.items()}
    free = {name for name, words in own.items() if any(w.startswith("draft=") for w in words)}
    for key, names in {"drafts": config.drafts, "compare.own": own}.items():
        for name in names:
            if name not in choices and name not in free:
                raise UserError(
                    f"{key} names {name!r}, which is no draft{nearest(str(name), choices)} "
                    f"(there are {', '.join(choices)})"
                )
    for name in (str(name) for name in config.drafts if name in own):
        chosen = [] if name in free else [f"draft={name}"]
        try:
            check("fit", [*chosen, *own[name]], folder=folder)
        except UserError as error:
            raise UserError(f"compare.own.{name}: {error}") from error


def _check_whole(config: DictConfig) -> None:
    """What only the whole config shows: values left out, broken references, a recipe misnamed, ranges."""
    chosen = config.hydra.runtime.choices.get("recipe")
    job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    written = flat_keys(job)
    if written.get("recipe") != chosen:
        raise UserError(f"recipe/{chosen}.yaml lacks the line `recipe: {chosen}`: add it")
    if missing := [key for key, value in written.items() if value == "???"]:
        raise UserError(f"{missing[0]} is not set: add {missing[0]}=... to the command")
    try:
        OmegaConf.resolve(job)
    except OmegaConfBaseException as error:
        raise UserError(f"the recipe does not compose: {one_line(error)}") from error
    check_ranges(flat_keys(job))
