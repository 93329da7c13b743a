"""Metrics as a CSV that a resumed run goes on with."""

from __future__ import annotations

import csv
from pathlib import Path

from mtptrain.train.metrics import MetricsCsv


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_columns_that_come_later_are_empty_before(tmp_path: Path) -> None:
    """One row a step: values of the same step stand side by side, Lightning's epoch is left out."""
    log = MetricsCsv(tmp_path / "m.csv", 0)
    log.log_metrics({"loss": 2.0, "epoch": 0}, 9)
    log.log_metrics({"curve": 1.5}, 12)
    log.log_metrics({"loss": 1.0}, 12)
    log.finalize("success")
    assert _read(tmp_path / "m.csv") == [
        {"step": "9", "loss": "2", "curve": ""},
        {"step": "12", "loss": "1", "curve": "1.5"},
    ]


def test_a_resumed_run_drops_what_it_writes_again(tmp_path: Path) -> None:
    """Rows from the step it starts at on are those of the killed run and go; earlier ones stay as they were."""
    path = tmp_path / "m.csv"
    log = MetricsCsv(path, 0)
    for step in (3, 6, 9):
        log.log_metrics({"loss": step / 7}, step)
    log.save()
    whole = path.read_text()
    again = MetricsCsv(path, 6)
    for step in (6, 9):
        again.log_metrics({"loss": step / 7}, step)
    again.save()
    assert path.read_text() == whole


def test_rows_reach_the_disk_while_training_goes_on(tmp_path: Path) -> None:
    """After twenty rows the file is there, whole."""
    log = MetricsCsv(tmp_path / "m.csv", 0)
    for step in range(20):
        log.log_metrics({"loss": 1.0}, step)
    assert len(_read(tmp_path / "m.csv")) == 20
