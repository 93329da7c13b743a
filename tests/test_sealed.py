"""Sealed folders: whole or absent, made once by many, made again when damaged."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mtptrain.sealed import make_once, verify
from mtptrain.types import UserError


class Builder:
    """Writes two files, slowly if told to, and counts how often it is asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls = 0
        self.seconds = seconds

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "weights").write_bytes(bytes(1000))
        (folder.parent / "scratch").write_bytes(b"left over")
        time.sleep(self.seconds)
        (folder / "nested").mkdir()
        (folder / "nested" / "config").write_text("{}")


def test_made_once(tmp_path: Path) -> None:
    """A folder that is whole is not built again, and nothing temporary stays beside it."""
    build = Builder()
    for _ in range(2):
        make_once(tmp_path / "a" / "folder", "one", build)
    assert build.calls == 1
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["folder", "folder.lock"]
    assert verify(tmp_path / "a" / "folder") == ()


@pytest.mark.parametrize("damage", ["cut", "removed", "manifest cut", "manifest removed"])
def test_damage_is_repaired(tmp_path: Path, damage: str) -> None:
    """A file cut short or removed, or a bad manifest, makes the next use build the folder again."""
    build, folder = Builder(), tmp_path / "folder"
    make_once(folder, "one", build)
    file = folder / ("manifest.json" if "manifest" in damage else "weights")
    file.unlink() if "removed" in damage else file.write_bytes(file.read_bytes()[:-2])
    make_once(folder, "one", build)
    assert build.calls == 2
    assert verify(folder) == ()


def test_other_fingerprint(tmp_path: Path) -> None:
    """A folder made from something else is replaced."""
    build = Builder()
    make_once(tmp_path / "folder", "one", build)
    make_once(tmp_path / "folder", "two", build)
    assert build.calls == 2


def test_verify_reads_every_byte(tmp_path: Path) -> None:
    """A flipped byte, which sizes cannot show, is found by verify and named."""
    folder = tmp_path / "folder"
    make_once(folder, "one", Builder())
    (folder / "weights").write_bytes(bytes(999) + b"x")
    assert verify(folder) == ("weights",)
    (folder / "nested" / "config").unlink()
    assert verify(folder) == ("nested/config", "weights")


def test_verify_without_a_manifest(tmp_path: Path) -> None:
    """A folder without a manifest cannot be verified, and the error says so in one line."""
    with pytest.raises(UserError, match=r"no readable manifest\.json in .*; remove the folder"):
        verify(tmp_path)


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    """A build that fails leaves no folder, and an older whole folder as it was."""

    def fail(folder: Path) -> None:
        (folder / "weights").write_bytes(b"half")
        raise RuntimeError("no more")

    folder = tmp_path / "folder"
    with pytest.raises(RuntimeError, match="no more"):
        make_once(folder, "one", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.lock"]
    make_once(folder, "one", Builder())
    with pytest.raises(RuntimeError, match="no more"):
        make_once(folder, "two", fail)
    assert verify(folder) == ()


def test_leftovers_of_a_killed_process_are_cleared(tmp_path: Path) -> None:
    """What a killed process left aside does not get into the folder."""
    partial = tmp_path / "folder.partial" / "new"
    partial.mkdir(parents=True)
    (partial / "stale").write_text("stale")
    make_once(tmp_path / "folder", "one", Builder())
    assert not (tmp_path / "folder" / "stale").exists()
    assert not (tmp_path / "folder.partial").exists()


def test_two_at_once(tmp_path: Path) -> None:
    """Of two that want the folder at the same moment one builds and the other waits for it.

    Threads stand in for processes: each opens the lock file anew, which is what the lock goes by.
    """
    build, start = Builder(seconds=0.2), threading.Barrier(2)

    def want(_: int) -> tuple[str, ...]:
        start.wait()
        make_once(tmp_path / "folder", "one", build)
        return verify(tmp_path / "folder")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(want, range(2))) == [(), ()]
    assert build.calls == 1


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A place that cannot be written is the user's to change, in one line."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write in .*; set MTPTRAIN_CACHE"):
        make_once(tmp_path / "file" / "folder", "one", Builder())
