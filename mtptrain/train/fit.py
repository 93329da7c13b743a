"""One training run: store in, trained draft out, resumable at any moment.

Lightning owns the loop and loggers; this file wires them and knows where they lie in the run folder. A
checkpoint is read with weights only, so a run folder executes nothing. Of several ranks the first writes. It
gives up sharded heads: every rank holds the whole draft and its frozen tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from mtptrain.launch import ALONE, Ranks
from mtptrain.losses.base import FeatureLoss, Loss, VocabLoss
from mtptrain.targets.base import Target
from mtptrain.train.anchors import Anchors
from mtptrain.train.callbacks import (
    HeldOutCurve,
    LogSteps,
    ShowProgress,
    StopAtNonFinite,
    plot_curves,
)
from mtptrain.train.checkpoint import WholeCheckpoints, read_checkpoint
from mtptrain.train.checks import check_teacher, footprints, unmoved
from mtptrain.train.clock import ENDLESS, TrainClock
from mtptrain.train.data import Share, StoreData, TapColumns
from mtptrain.train.metrics import MetricsCsv
from mtptrain.train.module import DraftModule, TrainSettings
from mtptrain.train.vocabulary import (
    AllTokens,
    SampledTokens,
    Scoring,
    heaviest,
    token_weights,
)
from mtptrain.types import UserError

CALIBRATION_SAMPLES = 32
LOG_EVERY = 10  # steps


@dataclass(frozen=True)
class TrainResult:
    """The trained draft and a few figures about the run."""

    draft: Draft
    steps: int
    supervised_rows: int
    unmoved: tuple[str, ...]  # norms that training has left at their start
    tokens: int  # that have gone through the draft, prompts included
    seconds: float  # of training alone, without the held-out curve


def fit_draft(
    config: HeadConfig,
    loss: Loss,
    target: Target,
    store: FeatureStore,
    backend: AttentionBackend,
    settings: TrainSettings,
    folder: Path,
    *,
    num_draft_tokens: int,
    seed: int,
    ranks: Ranks = ALONE,
) -> TrainResult:
    """Trains, or goes on from the checkpoint in `folder`; the same settings give the same bits either way."""
    checkpoint = folder / "checkpoints" / "last.ckpt"
    resume = read_checkpoint(checkpoint) if checkpoint.exists() else {}
    L.seed_everything(seed, verbose=False)
    columns = TapColumns.of(store, config.taps)
    check_teacher(store, columns.final, target, backend)
    weights = token_weights(store, columns.final, target)
    vocab = heaviest(weights, config.draft_vocab_size)
    draft = replace(config, draft_vocab=vocab).build(target)
    require_all_trained(draft, loss, settings)
    draft.calibrate(_some_features(store, columns))
    start = footprints(draft)
    begun = int(resume["global_step"]) if resume else 0
    clock = _clock(settings, folder, begun, resume, ranks)
    data = StoreData(
        store,
        config.taps,
        batch_tokens=settings.batch_tokens,
        epochs=settings.epochs,
        held_out=settings.held_out,
        seed=seed,
        start=begun,
        share=Share(ranks, settings.accumulate),
        steps=settings.max_steps or (ENDLESS if settings.max_minutes else None),
        anchors=_anchors(settings, seed),
    )
    steps = data.batches.steps
    scoring = _scoring(draft, target, weights, settings.scored_tokens, seed)
    several = data.batches.share.batches > 1
    whole_step = data.batches.whole_step if several else None
    module = DraftModule(draft, loss, settings, backend, scoring, steps, whole_step, seed, clock)
    if begun < steps:
        curve = HeldOutCurve(data, backend, num_draft_tokens, settings.curve_points, clock)
        callbacks = [clock, LogSteps(LOG_EVERY), curve, StopAtNonFinite(), ShowProgress(clock)]
        trainer = _trainer(settings, folder, begun, callbacks, ranks)
        trainer.fit(
            module,
            datamodule=data,
            ckpt_path=str(checkpoint) if resume else None,
            weights_only=True,
        )
        steps = trainer.global_step  # fewer where time was up
        if ranks.rank == 0:
            plot_curves(folder / "metrics.csv", folder / "curves.png")
    else:  # killed between its last checkpoint and the end of the stage
        module.load_state_dict(resume["state_dict"])
        module.on_load_checkpoint(resume)
    left = _unmoved(draft, start)
    return TrainResult(draft, steps, module.supervised_rows, left, clock.tokens, clock.seconds)


def _clock(
    settings: TrainSettings, folder: Path, start: int, resume: Mapping[str, Any], ranks: Ranks
) -> TrainClock:
    """Goes on from the checkpoint's time."""
    if settings.max_minutes and ranks.world > 1:
        raise UserError("train.max_minutes is for one rank; give several a number: train.max_steps")
    clock = TrainClock(folder / "clock.csv", start, settings.max_minutes)
    if held := resume.get("callbacks", {}).get(clock.state_key):
        clock.load_state_dict(held)
    return clock


def _anchors(settings: TrainSettings, seed: int) -> Anchors:
    everywhere = settings.supervise == "all"
    return Anchors(settings.anchors, everywhere, seed, settings.depth_keep, settings.depth_least)


def require_all_trained(draft: Draft, loss: Loss, settings: TrainSettings) -> None:
    """Raises UserError where a part of the draft would be left at its start, before hours are spent."""
    steps, most = settings.unroll_steps, draft.max_draft_tokens
    if most is not None and steps < most:
        raise UserError(
            f"train.unroll_steps={steps} leaves {most - steps} of the draft's {most} steps untrained; "
            f"use train.unroll_steps={most} or a draft of fewer steps"
        )
    if steps < draft.least_unroll_steps:
        raise UserError(
            f"train.unroll_steps={steps} leaves a part of the draft untrained; use at least "
            f"{draft.least_unroll_steps}"
        )
    over_features = [part for _, part in loss.summands() if isinstance(part, FeatureLoss)]
    if over_features and not draft.says_features:
        raise UserError(
            f"loss={type(loss).__name__} compares features and the draft's states are none of the target's; use a "
            "loss over the vocabulary, such as loss=kl"
        )
    over_vocabulary = [part for _, part in loss.summands() if isinstance(part, VocabLoss)]
    if draft.own_head() is not None and not over_vocabulary:
        raise UserError(
            f"loss={type(loss).__name__} compares features and trains no head of the draft's own; "
            "use draft.head=shared or a loss over the vocabulary"
        )
    if draft.says_confidence and not any(part.needs_confidence for part in over_vocabulary):
        raise UserError(
            f"loss={type(loss).__name__} leaves the draft's confidence untrained; use loss=dspark or "
            "draft.confidence=false"
        )


def _unmoved(draft: Draft, start: Mapping[str, tuple[float, float]]) -> tuple[str, ...]:
    """Norms still at their start. Raises RuntimeError where any other weight is."""
    left = unmoved(start, footprints(draft))
    if stuck := [name for name in left if "norm" not in name]:
        raise RuntimeError(f"training has not moved {', '.join(stuck)}: they are not in the graph")
    return left


def _scoring(draft: Draft, target: Target, weights: Tensor, size: int, seed: int) -> Scoring:
    if 0 < size < len(draft.head_rows()):
        return SampledTokens(target.head_weight, weights, size, seed, draft)
    return AllTokens(draft, target.vocab_size)


def _some_features(store: FeatureStore, columns: TapColumns) -> Tensor:
    """Those of a few samples spread over the store, [R, W]."""
    few = evenly(range(len(store)), CALIBRATION_SAMPLES)
    return torch.cat([columns.select(store[i].features) for i in few])


def _trainer(
    settings: TrainSettings, folder: Path, start: int, callbacks: Sequence[L.Callback], ranks: Ranks
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
        devices=ranks.local_world,
        num_nodes=ranks.world // ranks.local_world,
        strategy="ddp_find_unused_parameters_true" if ranks.world > 1 else "auto",
        accumulate_grad_batches=settings.accumulate,
        max_epochs=1,
        gradient_clip_val=settings.clip or None,
        callbacks=[*callbacks, save],
        plugins=[WholeCheckpoints()],
        logger=_loggers(settings, folder, start) if ranks.rank == 0 else False,
        log_every_n_steps=LOG_EVERY,
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
