"""Of two that want a folder one has it; the other is told who."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mtptrain.lock import only_writer
from mtptrain.run import LOCK, StageFolder
from mtptrain.types import UserError

HOLDER = """
import sys, time
from pathlib import Path
from mtptrain.lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def _hold(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    root = Path(__file__).parents[1]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_the_second_process_is_told_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    """The second gets one line with the folder and the first one's id; after SIGKILL the folder is free."""
    holder = _hold(tmp_path)
    before = (tmp_path / LOCK).read_bytes()
    with pytest.raises(UserError) as caught, only_writer(tmp_path):
        pass
    line = str(caught.value)
    assert "\n" not in line and f"{tmp_path} is being written" in line
    assert f"(process {holder.pid})" in line and "run_dir=" in line
    assert (tmp_path / LOCK).read_bytes() == before
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with only_writer(tmp_path):
        assert (tmp_path / LOCK).read_text() == str(os.getpid())


def test_one_process_takes_a_folder_again_and_again(tmp_path: Path) -> None:
    """A sweep's jobs follow each other in one process; a job that fails lets go as well."""
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), only_writer(tmp_path / "made"):
            raise ZeroDivisionError
    with only_writer(tmp_path / "made"), only_writer(tmp_path / "other"):
        pass


def test_a_held_folder_can_be_emptied_and_stays_held(tmp_path: Path) -> None:
    """New settings empty a stage's folder but for the lock, which is neither foreign nor part of the work."""
    with only_writer(tmp_path):
        assert StageFolder(tmp_path).begin("one") is False
        (tmp_path / "shard.bin").write_bytes(b"x")
        assert StageFolder(tmp_path).begin("two") is False
        assert {path.name for path in tmp_path.iterdir()} == {LOCK, "started.json"}
        with pytest.raises(UserError, match="is being written"), only_writer(tmp_path):
            pass
