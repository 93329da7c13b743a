"""Killed with SIGKILL in any stage and run again, `fit` ends with the head and report of an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

OVERRIDES = [
    "data.limit=24",
    "data.eval_limit=24",
    "data.max_turns=1",
    "draft.draft_vocab_size=0",
    "prepare.max_new_tokens=24",
    "prepare.shard_conversations=8",
    "train.epochs=40",
    "train.batch_tokens=256",
    "train.held_out=4",
    "train.checkpoint_every=5",
    "validate.max_new_tokens=24",
    "runtime.kv_tokens=16384",
]
MOMENTS: dict[str, str] = {  # the stage that is under way once this file is there
    "prepare": "cache/answers/*/answers-00000.jsonl",
    "train": "run/train/checkpoints/last.ckpt",
    "validate": "run/validate/started.json",
}


def _start(folder: Path, target: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "MTPTRAIN_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    code = "import sys; from mtptrain.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "fit",
        f"target.path={target}",
        f"run_dir={folder / 'run'}",
    ]
    return subprocess.Popen([*command, *OVERRIDES], env=environment, cwd=Path(__file__).parents[1])


def _outcome(folder: Path) -> tuple[bytes, dict[str, object]]:
    """The head's bytes, and the report without what a clock says."""
    report = json.loads((folder / "run" / "report.json").read_text())
    for timed in (report, report["sampled"]):
        del timed["speed"]
    del report["provenance"], report["draft"]
    return (folder / "run" / "draft" / "model.safetensors").read_bytes(), report


def _wait(appeared: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 100
    while not appeared():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < until, "the stage never began"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bytes, dict[str, object]]:
    folder = tmp_path_factory.mktemp("whole")
    assert _start(folder, tiny_folder).wait(110) == 0
    return _outcome(folder)


@pytest.mark.parametrize("stage", MOMENTS)
@pytest.mark.timeout(300)
def test_killed_and_run_again(
    stage: str, whole: tuple[bytes, dict[str, object]], tiny_folder: Path, tmp_path: Path
) -> None:
    """A SIGKILL in prepare, train or validate changes no bit of the head and no figure of the report."""
    process = _start(tmp_path, tiny_folder)
    _wait(lambda: bool(list(tmp_path.glob(MOMENTS[stage]))), process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "run" / "report.json").exists()
    assert _start(tmp_path, tiny_folder).wait(110) == 0
    head, report = _outcome(tmp_path)
    assert report == whole[1]
    assert head == whole[0]
