"""What the fault drills share: a small real run, started as a process of its own, and what it leaves.

Processes are forked from this one after its imports, so that a run of two seconds costs two seconds. The
result of a run is the SHA-256 of every file that must not depend on how the run went: answers, shards,
manifest, metrics, the draft. It gives up what a clock says (stage.json, the report's speed).
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import lightning.pytorch  # noqa: F401, so that no forked run imports it again
import torch
import transformers.models.llama.modeling_llama  # noqa: F401

import mtptrain.pipeline  # noqa: F401
from mtptrain.cli import main
from mtptrain.run import StageFolder

STAGES: dict[str, str] = {  # a stage has begun once this file is there
    "prepare": "cache/answers/*/started.json",
    "capture": "cache/stores/*/started.json",
    "train": "run/train/started.json",
}
FILES = (
    "cache/answers/*/answers-*.jsonl",
    "cache/answers/*/checksums.json",
    "cache/stores/*/features/*",
    "run/train/metrics.csv",
    "run/draft/*.json",
    "run/draft/*.safetensors",
)


@dataclass(frozen=True)
class Subject:
    """The run that is drilled: `mtptrain train` on this target with these settings."""

    target: Path
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run: its place, what it left, and how long its stages took."""

    place: Path
    result: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code (negative: the signal), and what it last said."""

    code: int
    line: str


def start(subject: Subject, place: Path, *more: str, verb: str = "train", limit: int = 0) -> int:
    """Starts the run in `place` (`cache`, `run`, `log` inside it); returns its process id.

    `limit` is the largest file in bytes that it may write, 0: any.
    """
    place.mkdir(parents=True, exist_ok=True)
    words = [verb, f"target.path={subject.target}", f"run_dir={place / 'run'}"]
    if child := os.fork():
        return child
    try:
        os.environ["MTPTRAIN_CACHE"] = str(place / "cache")
        log = os.open(f"{place}.{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        torch.set_num_threads(1)
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        os._exit(main([*words, *subject.settings, *more]))
    finally:
        os._exit(70)


def wait(process: int, place: Path) -> Ended:
    """Until the run in `place` has ended; its log is removed."""
    _, status = os.waitpid(process, 0)
    log = place.with_name(f"{place.name}.{process}.log")
    lines = log.read_text().strip().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return Ended(os.waitstatus_to_exitcode(status), lines[-1] if lines else "")


def run(subject: Subject, place: Path, *more: str, verb: str = "train") -> Ended:
    return wait(start(subject, place, *more, verb=verb), place)


def until_begun(stage: str, place: Path, process: int) -> None:
    """Returns once the stage has begun, or the run has ended."""
    while not list(place.glob(STAGES[stage])) and not _has_ended(process):
        time.sleep(0.002)


def _has_ended(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill(process: int) -> None:
    if not _has_ended(process):
        os.kill(process, signal.SIGKILL)


def result_of(place: Path) -> dict[str, str]:
    """SHA-256 by path of what the run left in `place`."""
    paths = sorted(path for pattern in FILES for path in place.glob(pattern) if path.is_file())
    return {str(p.relative_to(place)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def uninterrupted(subject: Subject, place: Path) -> Whole:
    """Runs the subject once. Raises SystemExit where that fails: there is then nothing to compare with."""
    ended = run(subject, place)
    if ended.code:
        raise SystemExit(f"the run fails without any fault: {ended.line}")
    seconds: dict[str, float] = {}
    for stage, begun in STAGES.items():
        record = StageFolder(next(iter(place.glob(begun))).parent).record()
        seconds[stage] = record.seconds if record else 0.0
    return Whole(place, result_of(place), seconds)


@dataclass(frozen=True)
class Tried:
    """One fault and what came of it."""

    fault: str
    where: str
    survived: bool
    remark: str


@dataclass(frozen=True)
class Field:
    """Where drills are held: the run, what it leaves when nothing happens, and a folder for the places."""

    subject: Subject
    whole: Whole
    folder: Path

    def ends_alike(self, place: Path, *more: str) -> tuple[bool, str]:
        """Runs again in `place`; whether that leaves what the uninterrupted run left."""
        ended = run(self.subject, place, *more)
        if ended.code:
            return False, ended.line
        found = result_of(place)
        wrong = sorted(
            p for p in found | self.whole.result if found.get(p) != self.whole.result.get(p)
        )
        return not wrong, f"differs: {', '.join(wrong[:3])}" if wrong else "the same bits"


@contextmanager
def a_place(field: Field) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="place-", dir=field.folder))
    try:
        yield place
    finally:
        shutil.rmtree(place)
