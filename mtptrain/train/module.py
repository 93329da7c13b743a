"""The LightningModule that fits a draft: unroll, loss, weights of steps, optimiser and schedule.

It knows no mechanism and no formula: the draft yields supervised rows step by step, the loss returns sums
and counts, and this file divides and weighs. Teacher states are looked up once per token and shared by the
steps. Where an optimiser's step takes several batches, here or on other ranks, each divides by the rows of
all of them, counted beforehand. It gives up logging what the others saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn

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
    accumulate: int = 1  # batches of one optimiser step, on each rank

    def __post_init__(self) -> None:
        for key, allowed in {
            "optimizer": ("adamw", "muon"),
            "supervise": ("assistant", "all"),
        }.items():
            if getattr(self, key) not in allowed:
                raise UserError(
                    f"train.{key}={getattr(self, key)} is unknown; use {' or '.join(allowed)}"
                )
        for key in ("epochs", "batch_tokens", "accumulate", "unroll_steps", "checkpoint_every"):
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
        whole_step: Callable[[int], Sequence[DraftBatch]] | None = None,
    ) -> None:
        """`whole_step` gives all batches of a step of the optimiser, without features; None: a batch is one."""
        super().__init__()
        self.draft, self.loss, self.settings, self.backend = draft, loss, settings, backend
        self.total_steps, self.whole_step = total_steps, whole_step
        self.step_rows, self.step_batches = torch.zeros(0), 1  # of the step under way
        self.supervised_rows = 0
        self.metrics: dict[str, Tensor] = {}  # of the newest step; `callbacks.LogSteps` writes them
        self.scoring = scoring

    def training_step(self, batch: DraftBatch, batch_idx: int) -> Tensor:
        step, part = divmod(batch_idx, self.settings.accumulate)
        begun = step >= self.settings.unroll_from * self.total_steps
        num_steps = self.settings.unroll_steps if begun else 1
        scored = self.scoring.of(batch, batch_idx)
        sums = self._sums(batch, self._supervised(batch), num_steps, scored)
        if part == 0:
            self._count(step, num_steps, sums.count)
        weights = self.settings.step_decay ** torch.arange(len(sums.loss), device=self.device)
        weights = weights / weights.sum()
        self.metrics = self._metrics((weights * sums.loss / sums.count.clamp(min=1)).sum(), sums)
        loss = (weights * sums.loss / self.step_rows.clamp(min=1)).sum()
        return loss * self.step_batches  # Lightning takes the mean over a step's batches

    def ends_step(self, batch_idx: int) -> bool:
        """Whether the optimiser moves behind this batch."""
        return (batch_idx + 1) % self.settings.accumulate == 0

    def _supervised(self, batch: DraftBatch) -> Tensor:
        everything = self.settings.supervise == "all"
        return torch.ones_like(batch.loss_mask) if everything else batch.loss_mask

    def _count(self, step: int, num_steps: int, own: Tensor) -> None:
        """The supervised rows of the optimiser's step that begins, per unrolled step."""
        self.step_rows, self.step_batches = own, 1
        if self.whole_step is not None:
            counts = [self._rows(b.to(own.device), num_steps) for b in self.whole_step(step)]
            self.step_rows, self.step_batches = torch.stack(counts).sum(0).to(own), len(counts)
        self.supervised_rows += int(self.step_rows[0])

    def _rows(self, batch: DraftBatch, num_steps: int) -> Tensor:
        rows = self.draft.label_rows(batch, num_steps, self._supervised(batch))
        return torch.stack([self.scoring.teaches(batch.input_ids[r]).sum() for r in rows])

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
            draft_head=scored.own_rows,
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
                self._muon_groups(parameters),
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

    def _muon_groups(self, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        own = self.draft.own_head()
        body = [p for p in parameters if p is not own]
        tables = [p for p in parameters if p is own]
        return [{"params": body}, *({"params": [p], "matrices": False} for p in tables)]

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
