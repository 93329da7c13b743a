"""The run folder: where things lie, what is already done, and what a result came from.

A stage is a folder. `started.json` is written first and says whose work lies there; `stage.json`
is written last and says that the work is whole, so a kill at any moment leaves a folder that is
resumed or begun afresh, and never taken for complete. Fingerprints cover what a stage was given,
not what it wrote: a file damaged later is for the stage's own checksums to find. A record that
cannot be read says nothing. That one process at a time writes here is `lock`'s to see to.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import metadata
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from mtptrain import __version__

VERBS: tuple[str, ...] = (
    *("fit", "prepare", "capture", "train", "validate"),
    *("compare", "inspect"),
)
LOCK = ".lock"  # see `lock`; it is in a folder but no part of what the folder holds
log = logging.getLogger("mtptrain")


def recipes_dir() -> Path:
    """The folder of recipes: the wheel's own, else the checkout's (an editable install)."""
    package = Path(__file__).resolve().parent
    packaged = package / "recipes"
    return packaged if packaged.is_dir() else package.parent / "recipes"


def cache_dir() -> Path:
    """`MTPTRAIN_CACHE`, else `mtptrain` in the user's cache folder. Not created here."""
    if named := os.environ.get("MTPTRAIN_CACHE"):
        return Path(named).expanduser()
    return _user_cache_dir() / "mtptrain"


def _user_cache_dir() -> Path:
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def data_file(path: str, key: str) -> Path:
    """The file or folder that `key=path` names: as given, else relative to the recipes folder.

    Raises UserError where neither exists.
    """
    for candidate in (Path(path).expanduser(), recipes_dir() / path):
        if path and candidate.exists():
            return candidate
    raise _user_error(
        f"{key}={path}: no such file; name a file or folder of prompts, or a hub data set, with {key}="
    )


def fingerprint(*parts: object) -> str:
    """sha256 (hex) over the parts as canonical JSON: the same in every process, on every machine.

    Parts are dataclasses, configs, mappings, sequences, paths, strings, numbers, booleans, None.
    1 and 1.0 are one setting (`temperature=0` is `temperature=0.0`), True is not 1.
    Raises TypeError for anything else, whose text might change from run to run.
    """
    text = json.dumps([_plain(part) for part in parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {type(value).__name__: named}
    if isinstance(value, (DictConfig, ListConfig)):
        return _plain(OmegaConf.to_container(value, resolve=True))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Path):
        return value.as_posix()
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"no fingerprint of a {type(value).__name__}: its text may change between runs")


def atomic_write(path: Path, content: str | bytes | memoryview) -> None:
    """Writes a file that is, after a crash at any moment, the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a full disk: its room is given back
        temporary.unlink(missing_ok=True)
        raise
    _fsync_folder(path.parent)


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class StageRecord:
    """What `stage.json` says of a finished stage. `seconds` is the time since it last began."""

    fingerprint: str
    seconds: float
    summary: dict[str, int | float | str]


class StageFolder:
    """A stage's folder, and whether the work in it is whole, cut short, or of other settings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began_s = time.monotonic()

    def record(self) -> StageRecord | None:
        """The finished stage's record; None while there is none that can be read."""
        match _read_json(self.path / "stage.json"):
            case {
                "fingerprint": str(key),
                "seconds": int() | float() as took,
                "summary": dict(said),
            }:
                return StageRecord(key, float(took), said)
        return None

    def is_complete(self, fingerprint: str) -> bool:
        record = self.record()
        return record is not None and record.fingerprint == fingerprint

    def begin(self, fingerprint: str) -> bool:
        """Makes the folder ready for work; True if work of this fingerprint lies there to resume.

        Work of another fingerprint is deleted, finished or not, and the log says so. Raises
        UserError, and touches nothing, where the folder holds files that no stage has put there.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._began_s = time.monotonic()
        started = _read_json(self.path / "started.json")
        if started == {"fingerprint": fingerprint}:
            (self.path / "stage.json").unlink(missing_ok=True)  # no longer whole once work goes on
            self._sweep()
            return True
        self._empty(owned=bool(started))
        atomic_write(self.path / "started.json", json.dumps({"fingerprint": fingerprint}))
        return False

    def _sweep(self) -> None:
        """Deletes what a killed process was in the middle of writing."""
        for left in self.path.rglob("*.tmp"):
            left.unlink()

    def _empty(self, owned: bool) -> None:
        """Deletes what lies here: the claim to be whole first, the owner's name last."""
        items = [item for item in self.path.iterdir() if item.name != LOCK]
        others = [item for item in items if item.suffix != ".tmp" and item.name != "started.json"]
        if others and not owned:
            raise _user_error(
                f"{self.path} holds files that mtptrain did not write ({others[0].name}): "
                f"move them away, or choose another folder with run_dir="
            )
        if others:
            log.info("%s: the settings have changed; it starts afresh", self.path)
        order = {"stage.json": 0, "started.json": 2}
        for item in sorted(items, key=lambda item: order.get(item.name, 1)):
            shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()

    def complete(self, fingerprint: str, **summary: int | float | str) -> None:
        """Marks the work as whole, a stage's last write; `summary` is a few figures about it."""
        started = _read_json(self.path / "started.json")
        assert started == {"fingerprint": fingerprint}, "a stage completes what it has begun"
        seconds = round(time.monotonic() - self._began_s, 3)
        record = StageRecord(fingerprint, seconds, summary)
        atomic_write(self.path / "stage.json", json.dumps(asdict(record), indent=2) + "\n")


def _read_json(path: Path) -> dict:
    """The object in the file; empty where there is none, or where it is not whole."""
    try:
        held = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


@dataclass(frozen=True)
class Provenance:
    """What a figure came from."""

    commit: str  # ends in -dirty where tracked files were changed; "unknown" outside a checkout
    versions: dict[str, str]
    hardware: str
    recipe: str
    seeds: dict[str, int]
    times: dict[str, float]  # seconds by stage


def provenance(config: DictConfig, times: Mapping[str, float] | None = None) -> Provenance:
    """Provenance of a run of this config, here and now; `times` are seconds by stage."""
    from mtptrain.machine import describe_machine  # imports torch

    installed = {name: metadata.version(name) for name in ("torch", "transformers", "lightning")}
    return Provenance(
        commit=_commit(Path(__file__).resolve().parents[1]),
        versions={"mtptrain": __version__, "python": platform.python_version(), **installed},
        hardware=describe_machine(),
        recipe=str(config.recipe),
        seeds={"seed": int(config.seed)},
        times=dict(times or {}),
    )


def _commit(checkout: Path) -> str:
    if not (checkout / ".git").exists():  # a wheel: its version says which code it is
        return "unknown"
    commit = _git(checkout, "rev-parse", "HEAD")
    dirty = commit and _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if dirty else commit or "unknown"


def _git(checkout: Path, *arguments: str) -> str:
    """What git prints; empty where there is no git or it fails: a report must not die of it."""
    command = ["git", "-C", str(checkout), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def save_resolved(config: DictConfig, run_dir: Path) -> Path:
    """Writes the composed config, every reference resolved, to `recipe.yaml` in the run folder."""
    path = run_dir / "recipe.yaml"
    atomic_write(path, OmegaConf.to_yaml(config, resolve=True))
    return path


def check_disk_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises UserError where the disk of `folder`, which need not exist, has too few free bytes."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise _user_error(
            f"{what} needs about {needed_bytes:,} bytes ({needed_bytes / 1e9:.1f} GB) in {folder}, "
            f"where {free_bytes:,} are free: free some, or move it with run_dir= or MTPTRAIN_CACHE"
        )


def _user_error(line: str) -> Exception:
    from mtptrain.types import UserError  # types imports torch, and `mtptrain --help` must not

    return UserError(line)
