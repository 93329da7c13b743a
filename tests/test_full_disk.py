"""A full disk in the middle of every writer: the old file stays, nothing half-written is left, the next try works.

Each writer is tried twice: on a real file system that is full (a tmpfs, where this machine allows mounting one),
and under a limit on the size of a file (RLIMIT_FSIZE), which any user may set.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hidden_state_cache import FeatureWriter, StoredSample, StoreIdentity, TapSpec
from mtptrain.drafts.folder import contract, save_draft
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.run import StageFolder, atomic_write
from mtptrain.sealed import make_once
from mtptrain.targets.base import Target
from mtptrain.train.checkpoint import WholeCheckpoints
from mtptrain.train.metrics import MetricsCsv

Full = Callable[[Path], Any]  # a context in which the folder's disk takes no more
TAP = TapSpec("final", None, "post", 64)
IDENTITY = StoreIdentity("t", "r", "f", "k", "c", "off", "rms", 1e-5, "d", (TAP,), "0")


@contextmanager
def _small_limit(folder: Path) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def _filled(folder: Path) -> Iterator[None]:
    with open(folder / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free)
    try:
        yield
    finally:
        (folder / "ballast").unlink()


@pytest.fixture(params=["tmpfs", "file size limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Full]]:
    """A folder, and how its disk is filled."""
    if request.param == "file size limit":
        yield tmp_path, _small_limit
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    try:
        yield tmp_path, _filled
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def _sample() -> StoredSample:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(40, 64, generator=draw)
    ids = torch.arange(40)
    return StoredSample("a", "all", ids, ids > 9, features)


def _shard(folder: Path) -> None:
    FeatureWriter(folder / "store", IDENTITY, "bf16").write_shard(0, [_sample()])


def _finish(folder: Path) -> None:
    FeatureWriter(folder / "store", IDENTITY, "bf16").finish()


def _checkpoint(folder: Path) -> None:
    WholeCheckpoints().save_checkpoint({"w": torch.ones(9000)}, folder / "last.ckpt")


def _metrics(folder: Path) -> None:
    log = MetricsCsv(folder / "metrics.csv", 0)
    for step in range(3):
        log.log_metrics({"loss": 1.0}, step)
    log.save()


def _stage(folder: Path) -> None:
    stage = StageFolder(folder / "stage")
    stage.begin("one")
    stage.complete("one", tokens=1)


def _seal(folder: Path) -> None:
    make_once(folder / "sealed", "one", lambda new: atomic_write(new / "w", bytes(9000)) or None)


WRITERS: dict[str, Callable[[Path], None]] = {
    "an answers file": lambda folder: atomic_write(folder / "answers-00000.jsonl", "x" * 9000),
    "a shard": _shard,
    "the manifest": _finish,
    "a checkpoint": _checkpoint,
    "the metrics": _metrics,
    "a stage's record": _stage,
    "a sealed folder": _seal,
}


def _files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.name != "ballast"}


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EFBIG)


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_nothing_half_written(name: str, disk: tuple[Path, Full]) -> None:
    """The writer says that the disk is full and leaves no file of its own; with room again it succeeds."""
    folder, full = disk
    if name == "the manifest":
        _shard(folder)
    before = _files(folder)
    with full(folder), pytest.raises(OSError) as caught:
        WRITERS[name](folder)
    assert _is_full(caught.value)
    left = {k: v for k, v in _files(folder).items() if not k.endswith(".lock")}
    assert left == before
    WRITERS[name](folder)
    assert set(_files(folder)) > set(before)


@pytest.mark.parametrize("name", ["an answers file", "a checkpoint"])
def test_a_full_disk_keeps_the_old_file(name: str, disk: tuple[Path, Full]) -> None:
    """What was there before the disk filled is there after, whole."""
    folder, full = disk
    WRITERS[name](folder)
    before = _files(folder)
    with full(folder), pytest.raises(OSError):
        WRITERS[name](folder)
    assert _files(folder) == before


def test_a_draft_written_onto_a_full_disk_is_no_draft(
    disk: tuple[Path, Full], tiny_target: Target
) -> None:
    """config.json goes first and comes last: the old head's cannot stand beside the new one's weights."""
    folder, full = disk
    draft = MTPConfig().build(tiny_target)
    promise = contract(draft, tiny_target, "f", "t", "k", "strip")
    save_draft(draft, folder / "draft", promise)
    with full(folder), pytest.raises(OSError):
        save_draft(draft, folder / "draft", promise)
    assert set(_files(folder / "draft")) == {"contract.json", "model.safetensors"}
    save_draft(draft, folder / "draft", promise)
    assert "config.json" in _files(folder / "draft")
