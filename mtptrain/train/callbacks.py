"""What happens beside the training steps: progress, the held-out curve, the loss plot, a finiteness check.

Lightning calls these; none of them changes the weights.
"""

from __future__ import annotations

import csv
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.progress import Progress, progress
from mtptrain.train.clock import TrainClock
from mtptrain.train.data import StoreData
from mtptrain.train.module import DraftModule
from mtptrain.types import DraftBatch
from mtptrain.validate.simulated import accepted_runs


class ShowProgress(L.Callback):
    """Steps, or seconds where training was given minutes; goes on from where a resumed run starts."""

    def __init__(self, clock: TrainClock) -> None:
        self.clock, self.shown = clock, 0
        self.stack: ExitStack = ExitStack()
        self.bar: Progress | None = None

    def _done(self, trainer: L.Trainer) -> int:
        return trainer.global_step if self.clock.limit_s is None else int(self.clock.seconds)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DraftModule)
        if not trainer.is_global_zero:
            return
        limit, self.shown = self.clock.limit_s, self._done(trainer)
        total, unit = (pl_module.total_steps, "steps") if limit is None else (int(limit), "s")
        shown = progress("train", total, unit=unit, done=self.shown)
        self.bar = self.stack.enter_context(shown)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert isinstance(pl_module, DraftModule)
        if self.bar is not None and pl_module.ends_step(batch_idx):
            self.bar.advance(self._done(trainer) - self.shown)
            self.shown = self._done(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stack.close()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self.stack.close()


def _write(trainer: L.Trainer, values: dict[str, float]) -> None:
    """Not through `self.log`: Lightning would write behind the step's checkpoint, and a kill in between would
    lose a row that no resumed run writes again."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=trainer.global_step - 1)


class LogSteps(L.Callback):
    """Writes the metrics of every `every`-th step."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert isinstance(pl_module, DraftModule)
        if trainer.global_step % self.every == 0 and pl_module.ends_step(batch_idx):
            _write(trainer, {name: float(value) for name, value in pl_module.metrics.items()})


class StopAtNonFinite(L.Callback):
    """A loss that is not finite ends the run at once: what follows would be noise."""

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and not bool(torch.isfinite(loss)):
            raise RuntimeError(
                f"the loss became {float(loss)} at step {trainer.global_step}; lower train.learning_rate"
            )


class HeldOutCurve(L.Callback):
    """Simulated acceptance length on held-out samples at `points` moments, against supervised rows and time."""

    def __init__(
        self,
        data: StoreData,
        backend: AttentionBackend,
        num_draft_tokens: int,
        points: int,
        clock: TrainClock,
    ) -> None:
        self.data, self.backend, self.num_draft_tokens = data, backend, num_draft_tokens
        self.points, self.clock, self.reached = points, clock, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DraftModule)
        self.reached = self._reached(trainer.global_step, pl_module)

    def _reached(self, step: int, module: DraftModule) -> int:
        return self.points * step // max(1, module.horizon(step))

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert isinstance(pl_module, DraftModule)
        if not self.points or not self.data.held_out or not trainer.is_global_zero:
            return
        reached = self._reached(trainer.global_step, pl_module)
        if reached > self.reached and pl_module.ends_step(batch_idx):
            self.reached = reached
            with self.clock.paused():
                self._point(trainer, pl_module)

    def _point(self, trainer: L.Trainer, module: DraftModule) -> None:
        point = {
            "held_out/simulated_acceptance_length": self._acceptance_length(module),
            "train/supervised_rows": float(module.supervised_rows),
        }
        _write(trainer, point)
        self.clock.note(trainer.global_step - 1)

    def _acceptance_length(self, module: DraftModule) -> float:
        accepted = passes = 0
        for batch in self.data.held_out_batches():
            run = accepted_runs(module.draft, batch, self.num_draft_tokens, self.backend)
            for a in _walk_rows(batch, run):
                accepted, passes = accepted + a, passes + 1
        return 1 + accepted / max(passes, 1)


def _walk_rows(batch: DraftBatch, run: Tensor) -> list[int]:
    """Accepted tokens of every pass over one document with one answer at its end."""
    row, last, passes = int(batch.loss_mask.int().argmax()) - 1, len(batch.input_ids) - 2, []
    row = max(row, 0)
    while row < last:
        passes.append(int(run[row]))
        row += passes[-1] + 1
    return passes


def plot_curves(metrics: Path, out: Path) -> None:
    """Loss and held-out acceptance length against supervised rows, from metrics.csv, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, key in zip(axes, ("train/loss", "held_out/simulated_acceptance_length"), strict=True):
        points = [(float(r["train/supervised_rows"]), float(r[key])) for r in rows if r.get(key)]
        if points:
            axis.plot(*zip(*points, strict=True))
        axis.set(xlabel="supervised rows", title=key)
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
