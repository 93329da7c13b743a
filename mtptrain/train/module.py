"""The LightningModule that fits a draft: unroll, loss, weights of steps, optimiser and schedule.

It knows no mechanism and no formula: the draft yields supervised rows step by step, the loss returns sums
and counts, and this file divides and weighs. Teacher states are looked up once per token and shared by the
steps. It gives up gradient accumulation: a batch is a token budget, so it is sized directly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base import Draft
from mtptrain.losses.base import FeatureLoss, LossSums, VocabLoss, compute
from mtptrain.train.muon import Muon
from mtptrain.train.vocabulary import ScoredTokens, Scoring
from mtptrain.types import DraftBatch, UserError


@dataclass(frozen=True)
class TrainSettings:
    """How a draft is fitted; from `train:` in the recipe."""

    epochs: int
    batch_tokens: int
    learning_rate: float
    optimizer: Literal["adamw", "muon"]
    muon_steps: int  # Newton-Schulz iterations
    other_lr_scale: float  # learning rate of non-matrices under muon, over that of matrices
    weight_decay: float
    warmup: float  # share of all steps
    clip: float  # gradient norm; 0: none
    unroll_steps: int
    unroll_from: float  # share of all steps after which more than the first drafted step is trained
    step_decay: float  # weight of unrolled step j is step_decay ** j, normalised
    scored_tokens: int  # vocabulary of one step's loss, drawn anew; 0: all that the draft can say
    supervise: Literal["assistant", "all"]
    held_out: int  # samples kept out for the curve
    curve_points: int
    checkpoint_every: int  # steps
    wandb: bool
    wandb_mode: Literal["offline", "online"]

    def __post_init__(self) -> None:
        for key, allowed in {
            "optimizer": ("adamw", "muon"),
            "supervise": ("assistant", "all"),
        }.items():
            if getattr(self, key) not in allowed:
                raise UserError(
                    f"train.{key}={getattr(self, key)} is unknown; use {' or '.join(allowed)}"
                )
        for key in ("epochs", "batch_tokens", "unroll_steps", "checkpoint_every"):
            if getattr(self, key) < 1:
                raise UserError(f"train.{key}={getattr(self, key)} must be at least 1")


class DraftModule(L.LightningModule):
    """See the file's opening."""

    def __init__(
        self,
        draft: Draft,
        loss: VocabLoss | FeatureLoss,
        settings: TrainSettings,
        backend: AttentionBackend,
        scoring: Scoring,
        total_steps: int,
    ) -> None:
        super().__init__()
        self.draft, self.loss, self.settings, self.backend = draft, loss, settings, backend
        self.total_steps = total_steps
        self.supervised_rows = 0
        self.metrics: dict[str, Tensor] = {}  # of the newest step; `callbacks.LogSteps` writes them
        self.scoring = scoring

    def training_step(self, batch: DraftBatch, batch_idx: int) -> Tensor:
        everything = self.settings.supervise == "all"
        mask = torch.ones_like(batch.loss_mask) if everything else batch.loss_mask
        begun = batch_idx >= self.settings.unroll_from * self.total_steps
        scored = self.scoring.of(batch, batch_idx)
        sums = self._sums(batch, mask, self.settings.unroll_steps if begun else 1, scored)
        weights = self.settings.step_decay ** torch.arange(len(sums.loss), device=self.device)
        weights = weights / weights.sum()
        loss = (weights * sums.loss / sums.count.clamp(min=1)).sum()
        self.supervised_rows += int(sums.count[0])
        self.metrics = self._metrics(loss, sums)
        return loss

    def _sums(
        self, batch: DraftBatch, mask: Tensor, num_steps: int, scored: ScoredTokens
    ) -> LossSums:
        steps = list(self.draft.unroll(batch, num_steps, mask, self.backend))
        labels = torch.cat([batch.input_ids[s.label_rows] for s in steps])
        scored_labels = scored.index[labels]
        return compute(
            self.loss,
            torch.cat([s.states for s in steps]),
            batch.final,
            scored_labels,
            (scored_labels >= 0).float(),  # a row whose token the draft cannot say teaches nothing
            scored.rows,
            target_rows=torch.cat([s.target_rows for s in steps]),
            step_rows=[len(s.states) for s in steps],
        )

    def _metrics(self, loss: Tensor, sums: LossSums) -> dict[str, Tensor]:
        count = sums.count.clamp(min=1)
        values = {"loss": loss.detach(), "supervised_rows": torch.tensor(self.supervised_rows)}
        means = zip(sums.acceptance / count, sums.agreement / count, strict=True)
        for j, (acceptance, agreement) in enumerate(means):
            values |= {f"acceptance_{j}": acceptance, f"agreement_{j}": agreement}
        return {f"train/{name}": value for name, value in values.items()}

    def configure_optimizers(self) -> Any:
        s = self.settings
        parameters = [p for p in self.draft.parameters() if p.requires_grad]
        if s.optimizer == "muon":
            optimizer: torch.optim.Optimizer = Muon(
                parameters,
                s.learning_rate,
                weight_decay=s.weight_decay,
                steps=s.muon_steps,
                other_lr_scale=s.other_lr_scale,
            )
        else:
            optimizer = torch.optim.AdamW(
                parameters,
                s.learning_rate,
                betas=(0.9, 0.95),
                weight_decay=s.weight_decay,
                fused=True,
            )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _schedule(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero over all planned steps."""
        warmup = max(1, round(self.settings.warmup * self.total_steps))
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.total_steps - warmup)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["supervised_rows"] = self.supervised_rows
        checkpoint["rng"] = torch.get_rng_state()  # whatever a draft or a loss may draw

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.supervised_rows = checkpoint["supervised_rows"]
        torch.set_rng_state(checkpoint["rng"])
