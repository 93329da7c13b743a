"""Budgets of training: steps in place of epochs, and minutes, whose clock goes on where a kill has stopped it."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hidden_state_cache import FeatureStore
from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.launch import Ranks
from mtptrain.losses.kl import KL
from mtptrain.targets.base import Target
from mtptrain.train.clock import ENDLESS, TrainClock
from mtptrain.train.fit import TrainResult, fit_draft
from mtptrain.train.module import DraftModule, TrainSettings
from mtptrain.types import DraftBatch, UserError

Fit = Callable[..., TrainResult]


@pytest.fixture
def fit(
    tiny_target: Target, store: FeatureStore, backend: AttentionBackend, settings: TrainSettings
) -> Fit:
    def run(folder: Path, ranks: Ranks | None = None, **changes: Any) -> TrainResult:
        how = replace(settings, epochs=1, batch_tokens=160, held_out=4, curve_points=3, **changes)
        kind = (MTPConfig(), KL(), tiny_target, store, backend, how, folder)
        more = {} if ranks is None else {"ranks": ranks}
        return fit_draft(*kind, num_draft_tokens=3, seed=3, **more)

    return run


def _times(folder: Path) -> list[dict[str, str]]:
    with (folder / "clock.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    train = DraftModule.training_step

    def training_step(self: DraftModule, batch: DraftBatch, batch_idx: int) -> Tensor:
        if self.trainer.global_step == step:
            raise KeyError("killed")
        return train(self, batch, batch_idx)

    monkeypatch.setattr(DraftModule, "training_step", training_step)


def test_the_clock_stands_still_while_paused(tmp_path: Path) -> None:
    """Only what passes outside of `paused` counts, and a clock of the same state goes on from there."""
    now = [10.0]
    clock = TrainClock(tmp_path / "clock.csv", 0, minutes=1, now=lambda: now[0])
    clock.on_train_start(None, None)  # pyright: ignore, it asks neither of them
    now[0] = 13.0
    with clock.paused():
        now[0] = 50.0
        assert clock.seconds == 3
    now[0] = 52.0
    again = TrainClock(tmp_path / "clock.csv", 0, minutes=1)
    again.load_state_dict(clock.state_dict())
    assert clock.seconds == again.seconds == 5


def test_the_horizon_is_the_plan_or_what_time_allows(tmp_path: Path) -> None:
    """Ten steps in 5 s make 120 in a minute, and never more than planned; before the first nothing is known."""
    free, timed = (TrainClock(tmp_path / "clock.csv", 0, minutes=m) for m in (None, 1))
    for clock in (free, timed):
        clock.load_state_dict({"seconds": 5.0, "tokens": 0})
    assert (free.horizon(10, 70), timed.horizon(10, ENDLESS), timed.horizon(10, 70)) == (
        70,
        120,
        70,
    )
    assert timed.horizon(0, ENDLESS) == ENDLESS


def test_steps_in_place_of_epochs(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More steps than the epoch has go through it again, fewer end inside it; killed and resumed, the bits and
    the counted tokens are the same."""
    whole = fit(tmp_path / "whole", max_steps=19)
    assert whole.steps == 19 and fit(tmp_path / "few", max_steps=2).steps == 2
    with monkeypatch.context() as patch:
        _kill_at(12, patch)
        with pytest.raises(KeyError):
            fit(tmp_path / "cut", max_steps=19)
    again = fit(tmp_path / "cut", max_steps=19)
    assert (again.steps, again.tokens) == (19, whole.tokens)
    states = zip(whole.draft.state_dict().values(), again.draft.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)


def test_minutes_end_training_and_its_schedule(
    fit: Fit, settings: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that ticks by tokens, 1,600 a minute: training ends with the first step behind the minute, the
    rate has then fallen to nothing, the curve has its points, and an interrupted run gets no more time."""
    monkeypatch.setattr(TrainClock, "seconds", property(lambda self: self.tokens * 60 / 1600))
    rates = list[float]()
    ends = TrainClock.on_train_end

    def watched(self: TrainClock, trainer: Any, pl_module: Any) -> None:
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        ends(self, trainer, pl_module)

    monkeypatch.setattr(TrainClock, "on_train_end", watched)
    whole = fit(tmp_path / "whole", max_minutes=1.0)
    assert 1600 <= whole.tokens < 1600 + 160 and 60 <= whole.seconds < 66
    assert len(rates) == 1 and rates[0] < 0.02 * settings.learning_rate  # it is set a step before
    times = _times(tmp_path / "whole")
    assert len(times) == 3 and float(times[-1]["tokens"]) == whole.tokens
    with monkeypatch.context() as patch:
        _kill_at(7, patch)
        with pytest.raises(KeyError):
            fit(tmp_path / "cut", max_minutes=1.0)
    again = fit(tmp_path / "cut", max_minutes=1.0)
    assert (again.steps, again.tokens) == (whole.steps, whole.tokens)
    assert _times(tmp_path / "cut") == times


def test_several_ranks_have_no_common_clock(fit: Fit, tmp_path: Path) -> None:
    """Ranks that stopped at steps of their own would wait for each other for ever."""
    with pytest.raises(UserError, match="train.max_minutes is for one rank"):
        fit(tmp_path, ranks=Ranks(0, 2, 2), max_minutes=1.0)
