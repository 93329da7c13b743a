"""How long work shows itself: a bar on a terminal, a line every 30 s elsewhere; and logging.

Both forms give the same figures: done, total, rate, time left. Lines instead of a bar keep log
files readable, which a bar's carriage returns are not. A line is written when work advances, so
work that stands still is silent: no thread is kept only to say so. Other ranks than 0 show nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, TextIO

import rich.progress as rich
from rich.console import Console

log = logging.getLogger("mtptrain")
LINE_INTERVAL_S = 30.0


class Progress(Protocol):
    """What work is handed to say how far it is."""

    def advance(self, n: int = 1) -> None: ...


@contextmanager
def progress(
    name: str,
    total: int,
    *,
    unit: str,
    done: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Shows work of `total` units while it runs; `done` of them were finished by an earlier run.

    Rate and time left count only what this run does. `clock` gives seconds.
    """
    if not is_first_rank():
        yield _Silent()
    elif sys.stderr.isatty():
        with _rich_bar(unit) as bar:
            yield _Bar(bar, bar.add_task(name, total=total, completed=done, rate=""), clock)
    else:
        lines = _Lines(name, total, unit, done, clock)
        yield lines
        lines.write()


def is_first_rank() -> bool:
    """True in a run of one process, and on rank 0 of several."""
    return os.environ.get("RANK", "0") == "0"


class _Silent:
    def advance(self, n: int = 1) -> None:
        pass


def _rich_bar(unit: str) -> rich.Progress:
    return rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn(f"{unit}  {{task.fields[rate]}}"),
        rich.TimeRemainingColumn(),
        console=Console(stderr=True),
    )


class _Bar:
    """Moves a rich bar and tells it the rate since the start."""

    def __init__(self, bar: rich.Progress, task: rich.TaskID, clock: Callable[[], float]) -> None:
        self.bar, self.task, self.clock = bar, task, clock
        self.own, self.began_s = 0, clock()

    def advance(self, n: int = 1) -> None:
        self.own += n
        rate = self.own / max(self.clock() - self.began_s, 1e-9)
        self.bar.update(self.task, advance=n, rate=f"{_number(rate)}/s")


class _Lines:
    """Logs a line when 30 s have passed since the last one, and one at the end."""

    def __init__(
        self, name: str, total: int, unit: str, done: int, clock: Callable[[], float]
    ) -> None:
        self.name, self.total, self.unit, self.clock = name, total, unit, clock
        self.own, self.done = 0, done
        self.began_s = self.written_s = clock()

    def advance(self, n: int = 1) -> None:
        self.own += n
        self.done += n
        if self.clock() - self.written_s >= LINE_INTERVAL_S:
            self.write()

    def write(self) -> None:
        self.written_s = self.clock()
        elapsed_s = self.written_s - self.began_s
        rate = self.own / max(elapsed_s, 1e-9)
        count = f"{self.done:,} of {self.total:,} {self.unit}"
        share = f"{self.done / max(self.total, 1):.0%}"
        time_ = self._time(rate, elapsed_s)
        log.info("%s: %s (%s), %s/s, %s", self.name, count, share, _number(rate), time_)

    def _time(self, rate: float, elapsed_s: float) -> str:
        if self.done >= self.total:
            return f"took {_duration(elapsed_s)}"
        return f"{_duration((self.total - self.done) / rate)} left" if rate else "time left unknown"


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is now, so that a rich bar can make way for a line."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def setup_logging(*, quiet: bool = True) -> None:
    """One handler on the "mtptrain" logger (other ranks than 0: warnings only); safe to call twice.

    `quiet` silences other packages' notices that a user can do nothing about. Call it before they
    are imported: transformers reads its verbosity then.
    """
    log.setLevel(logging.INFO if is_first_rank() else logging.WARNING)
    if not any(isinstance(handler, _Stderr) for handler in log.handlers):
        log.addHandler(_Stderr())
    if quiet:
        _quiet_others()


def _quiet_others() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # their bars fill log files
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.WARNING)
    for module in ("lightning", "torch", "transformers", "datasets"):
        for category in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"{module}(\.|$)")
