"""Progress on and off a terminal, and the logging set-up."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest

from mtptrain.progress import log, progress, setup_logging


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def untouched_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives back the handlers, levels, filters and variables that setup_logging changes."""
    for name in ("RANK", "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    handlers, level = list(log.handlers), log.level
    with warnings.catch_warnings():
        yield
    log.handlers[:] = handlers
    log.setLevel(level)


def test_elsewhere_than_on_a_terminal_a_line_is_written_every_30_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line after 30 s, not before, with share, rate and time left; and one at the end."""
    clock = Clock()
    with caplog.at_level(logging.INFO, "mtptrain"):
        with progress("prepare", 2000, unit="tokens", clock=clock) as bar:
            for _ in range(4):
                clock.now_s += 10
                bar.advance(500)
    assert caplog.messages == [
        "prepare: 1,500 of 2,000 tokens (75%), 50/s, 0:00:10 left",
        "prepare: 2,000 of 2,000 tokens (100%), 50/s, took 0:00:40",
    ]


def test_resumed_work_counts_what_was_done_but_not_in_the_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Units of an earlier run move the share, not the rate."""
    clock = Clock()
    with caplog.at_level(logging.INFO, "mtptrain"):
        with progress("train", 100, unit="steps", done=80, clock=clock) as bar:
            clock.now_s += 40
            bar.advance(10)
    assert caplog.messages[0] == "train: 90 of 100 steps (90%), 0.25/s, 0:00:40 left"


def test_work_of_no_units_still_ends_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """A total of zero divides by nothing."""
    with caplog.at_level(logging.INFO, "mtptrain"):
        with progress("capture", 0, unit="tokens", clock=Clock()):
            pass
    assert caplog.messages == ["capture: 0 of 0 tokens (0%), 0.00/s, took 0:00:00"]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a bar shows name, count, unit and rate."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    clock = Clock()
    with progress("prepare", 40, unit="tokens", clock=clock) as bar:
        clock.now_s += 2
        bar.advance(40)
    for part in ("prepare", "40/40", "tokens", "20/s"):
        assert part in screen.getvalue()


def test_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only rank 0 shows progress."""
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO, "mtptrain"):
        with progress("train", 1, unit="steps") as bar:
            bar.advance()
    assert caplog.messages == []


def test_log_lines_go_once_to_todays_stderr(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Set up twice, a line is written once, to the stderr of the moment."""
    setup_logging()
    setup_logging()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log.info("hello")
    assert sys.stderr.getvalue().count("hello") == 1  # type: ignore[attr-defined]


def test_other_packages_notices_are_quiet_unless_wanted() -> None:
    """quiet silences Lightning's notices; without it they stay."""
    notices = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    notices.setLevel(logging.NOTSET)
    setup_logging(quiet=False)
    assert notices.level == logging.NOTSET
    setup_logging()
    assert not notices.isEnabledFor(logging.INFO) and notices.isEnabledFor(logging.WARNING)
    notices.setLevel(logging.NOTSET)
