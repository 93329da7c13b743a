"""One training run: store in, trained draft out, resumable at any moment.

Lightning owns the loop, checkpoints and loggers; this file wires them and knows where they lie in the run
folder. A checkpoint is read with weights only, so a run folder executes nothing. It gives up several devices
for now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, WandbLogger
from torch import Tensor

from hidden_state_cache import FeatureStore
from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.datasets.base import evenly
from mtptrain.drafts.base import Draft, HeadConfig
from mtptrain.losses.base import FeatureLoss, VocabLoss
from mtptrain.targets.base import Target
from mtptrain.train.callbacks import HeldOutCurve, ShowProgress, StopAtNonFinite, plot_curves
from mtptrain.train.data import StoreData, TapColumns
from mtptrain.train.metrics import MetricsCsv
from mtptrain.train.module import DraftModule, TrainSettings
from mtptrain.train.vocabulary import (
    AllTokens,
    SampledTokens,
    Scoring,
    heaviest,
    token_weights,
)

CALIBRATION_SAMPLES = 32


@dataclass(frozen=True)
class TrainResult:
    """The trained draft and a few figures about the run."""

    draft: Draft
    steps: int
    supervised_rows: int


def fit_draft(
    config: HeadConfig,
    loss: VocabLoss | FeatureLoss,
    target: Target,
    store: FeatureStore,
    backend: AttentionBackend,
    settings: TrainSettings,
    folder: Path,
    *,
    num_draft_tokens: int,
    seed: int,
) -> TrainResult:
    """Trains, or goes on from the checkpoint in `folder`; the same settings give the same bits either way."""
    checkpoint = folder / "checkpoints" / "last.ckpt"
    resume = _load(checkpoint)
    L.seed_everything(seed, verbose=False)
    columns = TapColumns.of(store, config.taps)
    weights = token_weights(store, columns.final, target)
    vocab = heaviest(weights, config.draft_vocab_size)
    draft = replace(config, draft_vocab=vocab).build(target)
    draft.calibrate(_some_features(store, columns))
    data = StoreData(
        store,
        config.taps,
        batch_tokens=settings.batch_tokens,
        epochs=settings.epochs,
        held_out=settings.held_out,
        seed=seed,
        start=int(resume["global_step"]) if resume else 0,
    )
    steps = len(data.batches)
    scoring = _scoring(draft, target, weights, settings.scored_tokens, seed)
    module = DraftModule(draft, loss, settings, backend, scoring, steps)
    if data.batches.start < steps:
        curve = HeldOutCurve(data, backend, num_draft_tokens, settings.curve_points)
        trainer = _trainer(settings, folder, data.batches.start, [curve])
        trainer.fit(
            module,
            datamodule=data,
            ckpt_path=str(checkpoint) if resume else None,
            weights_only=True,
        )
        plot_curves(folder / "metrics.csv", folder / "curves.png")
    else:  # killed between its last checkpoint and the end of the stage
        module.load_state_dict(resume["state_dict"])
        module.on_load_checkpoint(resume)
    return TrainResult(draft, steps, module.supervised_rows)


def _scoring(draft: Draft, target: Target, weights: Tensor, size: int, seed: int) -> Scoring:
    if 0 < size < len(draft.head_rows()):
        return SampledTokens(target.head_weight, weights, size, seed)
    return AllTokens(draft, target.vocab_size)


def _some_features(store: FeatureStore, columns: TapColumns) -> Tensor:
    """Those of a few samples spread over the store, [R, W]."""
    few = evenly(range(len(store)), CALIBRATION_SAMPLES)
    return torch.cat([columns.select(store[i].features) for i in few])


def _load(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint, weights_only=True) if checkpoint.exists() else {}


def _trainer(
    settings: TrainSettings, folder: Path, start: int, extra: Sequence[L.Callback]
) -> L.Trainer:
    save = ModelCheckpoint(
        dirpath=folder / "checkpoints",
        every_n_train_steps=settings.checkpoint_every,
        save_top_k=0,
        save_last=True,
        enable_version_counter=False,
    )
    return L.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=1,
        gradient_clip_val=settings.clip or None,
        callbacks=[*extra, StopAtNonFinite(), ShowProgress(), save],
        logger=_loggers(settings, folder, start),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def _loggers(settings: TrainSettings, folder: Path, start: int) -> list[Logger]:
    loggers: list[Logger] = [MetricsCsv(folder / "metrics.csv", start)]
    if settings.wandb:
        offline = settings.wandb_mode == "offline"
        loggers.append(WandbLogger(project="mtptrain", save_dir=folder, offline=offline))
    return loggers
