"""Metrics as one CSV that survives a kill: a resumed run drops the rows it is about to write again.

Lightning's own CSV logger deletes the file of an earlier run in the same folder, and a run folder here is
resumed in place. Columns are fixed by the first row that needs them; the file is rewritten whole when a new
one appears. It gives up hyperparameters: the run folder's recipe.yaml has them.
"""

from __future__ import annotations

import csv
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from mtptrain.run import atomic_write


class MetricsCsv(Logger):
    """Appends one row a logged step to `path`, from step `start` on."""

    def __init__(self, path: Path, start: int) -> None:
        super().__init__()
        self.path = path
        self.rows = [row for row in _read(path) if int(row["step"]) < start]

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: see the file's opening. The signature is Lightning's."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {key: f"{value:.6g}" for key, value in metrics.items() if key != "epoch"}
        if self.rows and self.rows[-1]["step"] == str(step):
            self.rows[-1] |= values
        else:
            self.rows.append({"step": str(step), **values})
        self.save()  # at once: a checkpoint may follow that says this step is done

    def save(self) -> None:
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        atomic_write(self.path, text.getvalue())

    def finalize(self, status: str) -> None:
        self.save()


def _read(path: Path) -> list[dict[str, str]]:
    """Rows of an earlier run, without the empty cells of columns that came later."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
