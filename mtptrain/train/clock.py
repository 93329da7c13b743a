"""What training has taken so far, across interruptions, and the end of it where it was given minutes.

The clock stands still while the held-out curve is computed: measuring is no training. Its state is part of the
checkpoint, so time that was spent on steps which a kill has lost is lost with them. What it notes goes into a
file of its own: unlike metrics.csv, no two runs agree on it. It gives up ranks: each would have its own time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import lightning as L

from mtptrain.train.metrics import MetricsCsv
from mtptrain.types import DraftBatch

ENDLESS = 10**12  # steps: more than any clock lets pass


class TrainClock(L.Callback):
    """Counts seconds and tokens; stops training after `minutes`, None: never."""

    def __init__(
        self,
        file: Path,
        start: int,
        minutes: float | None = None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """`file` gets a row for each `note`, those of steps before `start` are kept."""
        self.limit_s = None if minutes is None else 60 * minutes
        self.tokens, self._before, self._began, self._now = 0, 0.0, None, now
        self._notes = MetricsCsv(file, start)

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._began is None else self._now() - self._began)

    def horizon(self, step: int, planned: int) -> int:
        """How many steps the whole training has: those planned, or at its pace up to `step` those that its time
        allows."""
        if self.limit_s is None:
            return planned
        paced = round(step * self.limit_s / self.seconds) if step and self.seconds else ENDLESS
        return min(planned, max(step, paced))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._before, self._began = self.seconds, None
        yield
        self._began = self._now()

    def note(self, step: int) -> None:
        """Writes down what training has taken up to and with `step`."""
        self._notes.log_metrics({"seconds": self.seconds, "tokens": float(self.tokens)}, step)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = self._now()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: DraftBatch,
        batch_idx: int,
    ) -> None:
        self.tokens += len(batch.input_ids)
        whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self.limit_s is not None and whole and self.seconds >= self.limit_s:
            trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before, self._began = self.seconds, None

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before, self.tokens = float(state_dict["seconds"]), int(state_dict["tokens"])
