"""Folders that are made once and appear whole or not at all, for many processes and users.

A sealed folder is built aside, under a lock; its `manifest.json` (size and SHA-256 of every file,
and the fingerprint of what it was made from) is written last, before one rename. Sizes are compared
on every use, which costs microseconds; checksums only by `verify`, since half a gigabyte takes a
third of a second. It gives up resuming: what was cut short starts again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mtptrain.run import atomic_write
from mtptrain.types import UserError

log = logging.getLogger("mtptrain")

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """One file of a sealed folder; `name` is relative to it, with forward slashes."""

    name: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a sealed folder was made from, and its files."""

    fingerprint: str
    files: tuple[FileRecord, ...]


def make_once(folder: Path, fingerprint: str, build: Callable[[Path], None]) -> None:
    """Fills `folder` by `build(empty_folder)`, unless it is whole and of this fingerprint already.

    `build` may leave temporary files beside the folder it is given: they are removed. Its
    exceptions pass through and leave nothing behind. Raises UserError when the place cannot be
    written.
    """
    if is_whole(folder, fingerprint):  # asked before the lock: the place may be read-only
        return
    with _lock(folder):
        if not is_whole(folder, fingerprint):  # another process may have made it meanwhile
            _replace(folder, fingerprint, build)


def is_whole(folder: Path, fingerprint: str) -> bool:
    """Whether the manifest is there, of this fingerprint, and every file of it has its size."""
    manifest = _read_manifest(folder)
    if manifest is None or manifest.fingerprint != fingerprint:
        return False
    paths = [(folder / record.name, record.size) for record in manifest.files]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def verify(folder: Path) -> tuple[str, ...]:
    """Names of the files that are absent or have another SHA-256 than in the manifest.

    Raises UserError when the folder has no readable manifest.
    """
    manifest = _read_manifest(folder)
    if manifest is None:
        raise UserError(
            f"no readable {MANIFEST} in {folder}; remove the folder and run again to make it anew"
        )
    return tuple(
        record.name for record in manifest.files if _sha256(folder / record.name) != record.sha256
    )


def _replace(folder: Path, fingerprint: str, build: Callable[[Path], None]) -> None:
    work = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
    try:
        new = work / "new"
        new.mkdir(parents=True)
        build(new)
        _seal(new, fingerprint)
        if folder.exists():
            os.replace(folder, work / "old")
        os.replace(new, folder)
        _fsync(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _seal(folder: Path, fingerprint: str) -> None:
    """Flushes every file to disk and writes the manifest, last."""
    files: list[dict[str, str | int]] = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        file.chmod(0o644)  # safetensors writes 0600, and a cache may be shared by users
        _fsync(file)
        name = file.relative_to(folder).as_posix()
        files.append({"name": name, "size": file.stat().st_size, "sha256": _sha256(file)})
    manifest = {"fingerprint": fingerprint, "files": files}
    atomic_write(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _read_manifest(folder: Path) -> Manifest | None:
    try:
        raw = json.loads((folder / MANIFEST).read_text())
        return Manifest(raw["fingerprint"], tuple(FileRecord(**record) for record in raw["files"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held by one process a folder at a time; the kernel drops it when that process dies."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(f"{folder.name}.lock").open("w")
    except OSError as error:
        advice = "set MTPTRAIN_CACHE to a folder that can be written"
        raise UserError(f"cannot write in {folder.parent} ({error.strerror}); {advice}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that is making %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(file: Path) -> str:
    """Hex digest of a file; empty where there is none."""
    if not file.is_file():
        return ""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
