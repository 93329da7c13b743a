"""The order of the rooms (design, section 3), read off the sources without importing them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = (  # a room imports those of its own line and of the lines above
    ("hidden_state_cache",),
    (
        *("types", "run", "launch", "template", "loss_mask", "chat", "machine"),
        *("progress", "compose", "sealed", "lock", "ranges", "__init__"),
    ),
    ("attention_backends",),
    ("layers",),
    ("targets", "datasets", "losses"),
    ("data",),
    ("drafts",),
    ("runtime",),
    ("prepare", "given", "marked", "capture", "train", "validate", "advise", "exporters"),
    ("parts",),
    ("inputs",),
    ("session",),
    ("pipeline",),
    ("overrides", "help"),
    ("cli",),
)
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
FILES = sorted(
    path.relative_to(ROOT)
    for package in ("mtptrain", "hidden_state_cache")
    for path in (ROOT / package).rglob("*.py")
)


@cache
def _imports(path: Path) -> frozenset[str]:
    """Absolute names of everything a file imports, also inside its functions."""
    names = set[str]()
    for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def _file(name: str) -> Path | None:
    """The project's file that an imported name is, or stands in."""
    parts = name.split(".")
    for end in (len(parts), len(parts) - 1):
        place = Path(*parts[:end]) if end else Path()
        for candidate in (place.with_suffix(".py") if end else place, place / "__init__.py"):
            if candidate in FILES:
                return candidate
    return None


def _ours(path: Path) -> set[Path]:
    return {file for name in _imports(path) if (file := _file(name)) is not None}


def _room(path: Path) -> str:
    return path.parts[0] if path.parts[0] == "hidden_state_cache" else Path(path.parts[1]).stem


def _kind(path: Path) -> str:
    """What of a shelf a file is, or belongs to."""
    return Path(path.parts[2]).stem


def _closure(path: Path) -> set[Path]:
    seen, todo = set[Path](), {path}
    while todo:
        seen |= todo
        todo = {file for p in todo for file in _ours(p)} - seen
    return seen


def _foreign(files: set[Path]) -> set[str]:
    return {name.split(".")[0] for path in files for name in _imports(path)}


def test_every_room_has_its_place() -> None:
    """A new file or folder of the package is put into the order above before it is merged."""
    assert {_room(path) for path in FILES} <= set(RANK)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_up_the_order(path: Path) -> None:
    """No file imports a room that stands below its own."""
    below = {str(p) for p in _ours(path) if RANK[_room(p)] > RANK[_room(path)]}
    assert not below


def test_no_file_imports_itself_in_a_circle() -> None:
    """Inside a room, too, imports have a direction."""
    circles = [
        str(path) for path in FILES if any(path in _closure(p) for p in _ours(path) - {path})
    ]
    assert not circles


@pytest.mark.parametrize(
    "shelf", ["datasets", "targets", "drafts", "losses", "attention_backends", "exporters"]
)
def test_files_on_a_shelf_import_base_only(shelf: str) -> None:
    """One file is one kind; what kinds share is in base."""
    on_it = [p for p in FILES if p.parts[:2] == ("mtptrain", shelf)]
    for path in on_it:
        others = {_kind(p) for p in _ours(path) if p in on_it} - {_kind(path)}
        assert others <= {"base"}


def test_the_runtime_knows_no_lightning() -> None:
    """Serving loads nothing of training, not even through others; training knows no FlashInfer."""
    for path in FILES:
        if _room(path) == "runtime":
            assert not _foreign(_closure(path)) & {"lightning", "hydra", "wandb", "matplotlib"}
        if _room(path) == "train":
            assert "flashinfer" not in _foreign({path})


def test_the_store_stands_alone() -> None:
    """hidden_state_cache imports torch, numpy, safetensors and Python's own modules only."""
    import sys

    store = {p for p in FILES if _room(p) == "hidden_state_cache"}
    others = _foreign(store) - set(sys.stdlib_module_names)
    assert others <= {"torch", "numpy", "safetensors", "hidden_state_cache"}


def test_no_serving_engine_is_imported() -> None:
    """Engines are optional and never imported by the package."""
    assert not _foreign(set(FILES)) & {"vllm", "sglang", "tensorrt_llm"}
