"""The LightningModule that fits a draft: unroll, loss, weights of rows and steps, optimiser and schedule.

It knows no mechanism and no formula: the draft yields supervised rows step by step, the loss returns sums
and counts, and this file divides and weighs. Teacher states are looked up once per token and shared by the
steps. Where an optimiser's step takes several batches, here or on other ranks, each divides by the rows (or,
where documents weigh the same, the documents) of all of them, counted beforehand. Noise on features is a
function of the seed and the batch, so that a resumed run draws it again. It gives up logging what the others
saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base import Draft
from mtptrain.losses.base import Loss, LossSums
from mtptrain.losses.base.chunks import compute
from mtptrain.train.clock import TrainClock
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
    feature_noise: float = (
        0.0  # half the width of uniform noise on the features that the draft reads
    )
    average: Literal["rows", "samples"] = "rows"  # what weighs the same in a step's loss
    anchors: int = 0  # rows of a document that draft in one step, drawn anew each time; 0: all
    depth_keep: float = 1.0  # share of the rows that draft a token which draft a further one
    depth_least: float = 0.0  # share of the rows that draft all the tokens they can, at least
    max_steps: int | None = None  # so many in place of the epochs' own
    max_minutes: float | None = (
        None  # of training, in place of the epochs; the schedule follows the clock
    )

    def __post_init__(self) -> None:
        for key, allowed in {
            "optimizer": ("adamw", "muon"),
            "supervise": ("assistant", "all"),
            "average": ("rows", "samples"),
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
        loss: Loss,
        settings: TrainSettings,
        backend: AttentionBackend,
        scoring: Scoring,
        total_steps: int,
        whole_step: Callable[[int], Sequence[DraftBatch]] | None = None,
        seed: int = 0,
        clock: TrainClock | None = None,
    ) -> None:
        """`whole_step` gives all batches of a step of the optimiser, without features; None: a batch is one.
        `clock` ends training where it was given minutes; then `total_steps` are the most there can be."""
        super().__init__()
        self.draft, self.loss, self.settings, self.backend = draft, loss, settings, backend
        self.total_steps, self.whole_step, self.seed = total_steps, whole_step, seed
        self.clock = clock
        self.step_weight, self.step_batches = torch.zeros(0), 1  # of the step under way
        self.num_steps = 1  # that it unrolls
        self.supervised_rows = 0
        self.metrics: dict[str, Tensor] = {}  # of the newest step; `callbacks.LogSteps` writes them
        self.scoring = scoring

    def training_step(self, batch: DraftBatch, batch_idx: int) -> Tensor:
        step, part = divmod(batch_idx, self.settings.accumulate)
        if part == 0:  # for the whole step: the clock goes on while it is under way
            begun = step >= self.settings.unroll_from * self.horizon(step)
            self.num_steps = self.settings.unroll_steps if begun else 1
            self._count(step, self.num_steps, batch)
        scored = self.scoring.of(batch, batch_idx)
        noisy = self._with_noise(batch, batch_idx)
        sums = self._sums(noisy, self._supervised(batch), self.num_steps, scored)
        weights = self.settings.step_decay ** torch.arange(len(sums.loss), device=self.device)
        weights = weights / weights.sum()
        self.metrics = self._metrics((weights * sums.loss / sums.count.clamp(min=1)).sum(), sums)
        loss = (weights * sums.loss / self.step_weight.clamp(min=1)).sum()
        return loss * self.step_batches  # Lightning takes the mean over a step's batches

    def horizon(self, step: int) -> int:
        """Steps of the whole training, as far as is known at `step`."""
        return self.clock.horizon(step, self.total_steps) if self.clock else self.total_steps

    def ends_step(self, batch_idx: int) -> bool:
        """Whether the optimiser moves behind this batch."""
        return (batch_idx + 1) % self.settings.accumulate == 0

    def _supervised(self, batch: DraftBatch) -> Tensor:
        everything = self.settings.supervise == "all"
        return torch.ones_like(batch.loss_mask) if everything else batch.loss_mask

    def _with_noise(self, batch: DraftBatch, batch_idx: int) -> DraftBatch:
        """The batch as the draft reads it; what it is held against stays as it is."""
        width = self.settings.feature_noise
        if not width:
            return batch
        number = (self.seed * 1_000_003 + batch_idx) * 65_537 + self.global_rank
        order = torch.Generator().manual_seed(number & (2**63 - 1))
        noise = 2 * torch.rand(batch.features.shape, generator=order) - 1
        return replace(batch, features=batch.features + width * noise.to(batch.features))

    def _count(self, step: int, num_steps: int, batch: DraftBatch) -> None:
        """What the rows of the optimiser's step that begins weigh together, per unrolled step."""
        batches = [batch] if self.whole_step is None else self.whole_step(step)
        weights = [self._planned_weights(b.to(batch.input_ids.device), num_steps) for b in batches]
        self.step_weight = torch.stack([torch.stack([w.sum() for w in x]) for x in weights]).sum(0)
        self.step_batches = len(batches)
        self.supervised_rows += sum(int(first.count_nonzero()) for first, *_ in weights)

    def _planned_weights(self, batch: DraftBatch, num_steps: int) -> list[Tensor]:
        """`_weights` of every step that `unroll` would yield."""
        rows = self.draft.label_rows(batch, num_steps, self._supervised(batch))
        return [self._weights(batch, r) for r in rows]

    def _weights(self, batch: DraftBatch, label_rows: Tensor) -> Tensor:
        """Of one step's rows, [R] fp32: 1 each, or adding up to 1 over each document that has any. A row whose
        token the draft cannot say weighs nothing."""
        teaches = self.scoring.teaches(batch.input_ids[label_rows]).float()
        if self.settings.average == "rows":
            return teaches
        document = torch.bucketize(label_rows, batch.cu_seqlens[1:], right=True)
        total = teaches.new_zeros(len(batch.cu_seqlens) - 1).index_add_(0, document, teaches)
        return teaches / total.clamp(min=1)[document]

    def _sums(
        self, batch: DraftBatch, mask: Tensor, num_steps: int, scored: ScoredTokens
    ) -> LossSums:
        steps = list(self.draft.unroll(batch, num_steps, mask, self.backend))
        labels = torch.cat([batch.input_ids[s.label_rows] for s in steps])
        sure = [s.confidence for s in steps if s.confidence is not None]
        return compute(
            self.loss,
            torch.cat([s.states for s in steps]),
            batch.final,
            scored.index[labels],
            torch.cat([self._weights(batch, s.label_rows) for s in steps]),
            scored.rows,
            target_rows=torch.cat([s.target_rows for s in steps]),
            step_rows=[len(s.states) for s in steps],
            origins=torch.cat([s.label_rows - j for j, s in enumerate(steps)]),
            draft_head=scored.own_rows,
            beside=scored.beside,
            confidence=torch.cat(sure) if sure else None,
            stands_for=scored.stands_for if sure else None,
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
        apart = {id(p) for p in self.draft.tables()}
        body = [p for p in parameters if id(p) not in apart]
        tables = [p for p in parameters if id(p) in apart]
        return [{"params": body}, *({"params": [p], "matrices": False} for p in tables)]

    def _schedule(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero over all steps."""
        total = self.horizon(step)
        warmup = max(1, round(self.settings.warmup * total))
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["supervised_rows"] = self.supervised_rows
        checkpoint["rng"] = torch.get_rng_state()  # whatever a draft or a loss may draw

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.supervised_rows = checkpoint["supervised_rows"]
        torch.set_rng_state(checkpoint["rng"])
