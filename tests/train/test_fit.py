"""One training run with Lightning: the same bits whether it was interrupted or not."""

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
from mtptrain.drafts.base import HeadConfig
from mtptrain.drafts.dflash import DFlashConfig
from mtptrain.drafts.dspark import DSparkConfig
from mtptrain.drafts.eagle3 import Eagle3Config
from mtptrain.drafts.medusa import MedusaConfig
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.drafts.peagle import PEagleConfig
from mtptrain.losses.base import FeatureLoss, VocabLoss
from mtptrain.losses.kl import KL
from mtptrain.losses.smooth_l1 import SmoothL1
from mtptrain.targets.base import Target
from mtptrain.train.checkpoint import WholeCheckpoints
from mtptrain.train.fit import LOG_EVERY, TrainResult, fit_draft
from mtptrain.train.module import DraftModule, TrainSettings
from mtptrain.types import Completion, DraftBatch, UserError
from mtptrain.validate.acceptance import measure_acceptance
from mtptrain.validate.simulated import simulate

CURVE = "held_out/simulated_acceptance_length"
CONFIG = MTPConfig(taps=("layer.1", "final"), draft_vocab_size=200)
BLOCK = DFlashConfig(taps=("layer.1", "layer.2"), num_layers=2, block_size=4)
PARALLEL = PEagleConfig(taps=("layer.1", "layer.2"), num_layers=2)
CORRECTED = DSparkConfig(
    taps=("layer.1",), num_layers=2, block_size=3, draft_vocab_size=200, confidence=False
)
OWN_HEAD = Eagle3Config(taps=("layer.1", "layer.2"), draft_vocab_size=200, head="own")


@pytest.fixture(scope="module")
def fit(
    tiny_target: Target, store: FeatureStore, backend: AttentionBackend, settings: TrainSettings
) -> Callable[..., TrainResult]:
    def run(folder: Path, config: MTPConfig = CONFIG, seed: int = 3, **changes: Any) -> TrainResult:
        how = replace(settings, epochs=2, batch_tokens=160, **changes)
        kind = (config, KL(), tiny_target, store, backend, how, folder)
        return fit_draft(*kind, num_draft_tokens=3, seed=seed)

    return run


@pytest.fixture(scope="module")
def whole(
    fit: Callable[..., TrainResult], tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainResult, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return fit(folder, held_out=4, curve_points=2, unroll_from=0.5), folder


def _weights(result: TrainResult) -> dict[str, Tensor]:
    return result.draft.state_dict()


def _same(a: TrainResult, b: TrainResult) -> bool:
    pairs = zip(_weights(a).items(), _weights(b).items(), strict=True)
    return all(n == m and torch.equal(x, y) for (n, x), (m, y) in pairs)


def test_metrics_are_on_disk_before_the_checkpoint_of_their_step(
    fit: Callable[..., TrainResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill behind a checkpoint loses no row that an uninterrupted run has."""
    honest, seen = WholeCheckpoints.save_checkpoint, list[list[str]]()  # what is missing

    def watched(
        self: WholeCheckpoints,
        checkpoint: dict[str, Any],
        path: Path,
        storage_options: object = None,
    ) -> None:
        with (tmp_path / "metrics.csv").open(newline="") as file:
            rows = {int(row["step"]): row for row in csv.DictReader(file)}
        step = int(checkpoint["global_step"])
        expected = ["train/loss", CURVE] if step % LOG_EVERY == 0 else [CURVE]
        seen.append([key for key in expected if not rows[step - 1].get(key)])
        honest(self, checkpoint, path)

    monkeypatch.setattr(WholeCheckpoints, "save_checkpoint", watched)
    fit(tmp_path, held_out=4, curve_points=10**6, checkpoint_every=10)  # a point after every step
    assert seen and not any(seen)


class Killed(Exception):
    """Stands for a kill between two steps."""


def _kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    train = DraftModule.training_step

    def training_step(self: DraftModule, batch: DraftBatch, batch_idx: int) -> Tensor:
        if self.trainer.global_step == step:
            raise Killed
        return train(self, batch, batch_idx)

    monkeypatch.setattr(DraftModule, "training_step", training_step)


@pytest.mark.parametrize("moment", [2, 5, 12, "last"])
def test_an_interrupted_run_ends_with_the_same_bits(
    moment: int | str,
    whole: tuple[TrainResult, Path],
    fit: Callable[..., TrainResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed before the first checkpoint, at one, between two, or at the last step, and run again: the weights,
    the counts and the rows of metrics.csv are those of a run that was left alone."""
    result, folder = whole
    step = result.steps - 1 if moment == "last" else int(moment)
    with monkeypatch.context() as patch:
        _kill_at(step, patch)
        with pytest.raises(Killed):
            fit(tmp_path, held_out=4, curve_points=2, unroll_from=0.5)
    again = fit(tmp_path, held_out=4, curve_points=2, unroll_from=0.5)
    assert _same(result, again)
    assert (again.steps, again.supervised_rows) == (result.steps, result.supervised_rows)
    assert (tmp_path / "metrics.csv").read_text() == (folder / "metrics.csv").read_text()
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_killed_behind_the_last_checkpoint(fit: Callable[..., TrainResult], tmp_path: Path) -> None:
    """Where only the end of the stage was missing, nothing is trained again and the result is the same."""
    first = fit(tmp_path, checkpoint_every=1)
    again = fit(tmp_path, checkpoint_every=1)
    assert _same(first, again) and again.supervised_rows == first.supervised_rows > 0


@pytest.mark.parametrize(
    "how",
    [
        {"optimizer": "muon", "learning_rate": 1e-2},
        {"scored_tokens": 64},
        {"accumulate": 2, "checkpoint_every": 3},
        {"feature_noise": 0.2, "average": "samples"},
        {"config": OWN_HEAD, "optimizer": "muon", "scored_tokens": 64},
        {"config": MedusaConfig(num_heads=3)},
        {"config": BLOCK, "anchors": 5, "accumulate": 2, "checkpoint_every": 3},
        {"config": CORRECTED, "optimizer": "muon", "scored_tokens": 64},
        {"config": PARALLEL, "depth_keep": 0.7, "accumulate": 2, "checkpoint_every": 3},
    ],
)
def test_every_choice_resumes(
    how: dict[str, object],
    fit: Callable[..., TrainResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Muon's momentum is part of the checkpoint, the tokens and the noise drawn for a step are a function of the
    step, a step of several batches is resumed at its first."""
    result = fit(tmp_path / "whole", **how)
    with monkeypatch.context() as patch:
        _kill_at(min(7, result.steps - 1), patch)
        with pytest.raises(Killed):
            fit(tmp_path / "cut", **how)
    assert _same(result, fit(tmp_path / "cut", **how))


@pytest.mark.parametrize(
    ("config", "loss", "message"),
    [
        (MedusaConfig(), KL(), "train.unroll_steps=3 leaves 1 of the draft's 4 steps untrained"),
        (
            MTPConfig(depth=5),
            KL(),
            "train.unroll_steps=3 leaves 2 of the draft's 5 steps untrained",
        ),
        (OWN_HEAD, SmoothL1(), "loss=SmoothL1 compares features and trains no head"),
        (
            replace(CORRECTED, confidence=True),
            KL(),
            "loss=KL leaves the draft's confidence untrained; use loss=dspark or draft.confidence=",
        ),
    ],
)
def test_what_would_stay_untrained_is_refused_at_the_start(
    config: HeadConfig,
    loss: VocabLoss | FeatureLoss,
    message: str,
    tiny_target: Target,
    store: FeatureStore,
    backend: AttentionBackend,
    settings: TrainSettings,
    tmp_path: Path,
) -> None:
    """One line, and no checkpoint: not an error behind the last step."""
    kind = (config, loss, tiny_target, store, backend, settings, tmp_path)
    with pytest.raises(UserError, match=message):
        fit_draft(*kind, num_draft_tokens=3, seed=0)
    assert not list(tmp_path.iterdir())


def test_a_mask_that_no_step_would_train_is_refused_at_the_start(
    fit: Callable[..., TrainResult], tmp_path: Path
) -> None:
    """P-EAGLE's learned vector stands behind the first drafted token only."""
    with pytest.raises(UserError, match="train.unroll_steps=1 leaves a part .*; use at least 2$"):
        fit(tmp_path, config=PARALLEL, unroll_steps=1)


def test_seed_and_settings_decide_the_result(
    whole: tuple[TrainResult, Path], fit: Callable[..., TrainResult], tmp_path: Path
) -> None:
    """The same run in another folder gives the same bits, another seed does not."""
    same = fit(tmp_path / "same", held_out=4, curve_points=0, unroll_from=0.5)
    assert _same(whole[0], same)
    assert not _same(whole[0], fit(tmp_path / "other", seed=4, held_out=4, unroll_from=0.5))


def test_the_curve_ends_at_the_trained_drafts_own_value(
    fit: Callable[..., TrainResult],
    store: FeatureStore,
    answers: list[Completion],
    backend: AttentionBackend,
    tmp_path: Path,
) -> None:
    """The last point is the simulated acceptance length of the finished draft on the held-out answers."""
    result = fit(tmp_path, MTPConfig(), held_out=4, curve_points=1)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["held_out/simulated_acceptance_length"]]
    assert [int(r["step"]) for r in rows] == [result.steps - 1]
    held = [replace(answers[i], features=store[i].features[:, -64:]) for i in (0, 6, 12, 18)]
    walked = list(simulate(result.draft, held, 3, backend))
    value = measure_acceptance(walked, 3).acceptance_length.value
    assert float(rows[0]["held_out/simulated_acceptance_length"]) == pytest.approx(value, rel=1e-4)


def test_a_reduced_vocabulary_is_chosen_and_kept(whole: tuple[TrainResult, Path]) -> None:
    """The draft carries the ids that training chose, ascending."""
    vocab = whole[0].draft.config.draft_vocab
    assert len(vocab) == 200 and list(vocab) == sorted(set(vocab))


def test_a_loss_that_is_not_finite_stops_the_run(
    fit: Callable[..., TrainResult], tmp_path: Path
) -> None:
    """The message names the step and the remedy."""
    with pytest.raises(RuntimeError, match="the loss became .* lower train.learning_rate"):
        fit(tmp_path, learning_rate=1e25, clip=0.0, checkpoint_every=1)
