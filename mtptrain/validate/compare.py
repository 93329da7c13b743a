"""Drafts side by side: what each accepted, costs and took to train, as compare.json.

Everything is taken from files that the drafts' own runs have written (report, clock and curve of the training)
and from one measurement more, the cost at a few batch sizes; so a comparison is put together again in no time,
and says nothing that a run of one draft would not. It gives up paired intervals: runs keep counts, no passes.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hidden_state_cache.decode import decode
from mtptrain.run import Provenance, StageFolder, atomic_write
from mtptrain.types import UserError
from mtptrain.validate.acceptance import AcceptanceLength, Interval
from mtptrain.validate.figures import Lossless, Report, Sampling
from mtptrain.validate.speed import DraftCost

SCHEMA = 1
LENGTH = "held_out/simulated_acceptance_length"


@dataclass(frozen=True)
class CurvePoint:
    """A moment of training."""

    seconds: float  # of training alone
    tokens: int
    simulated_acceptance_length: float  # on held-out answers


@dataclass(frozen=True)
class Budget:
    """What a head was given to train: the first of minutes and steps to be over, or, with neither, epochs."""

    minutes: float | None
    steps: int | None
    epochs: int


@dataclass(frozen=True)
class Training:
    """What a head's training took; tokens are those that went through the draft, prompts included."""

    budget: Budget
    steps: int
    seconds: float  # of training alone, without the held-out curve
    tokens: int
    supervised_rows: int
    curve: tuple[CurvePoint, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class ComparedDraft:
    """One line of the comparison."""

    name: str  # as `drafts=` has it
    draft: str  # the mechanism
    sampling: Sampling  # its own proposals; tokens are drawn alike for all
    tokens_per_step: float | None
    tokens_per_step_ci95: Interval | None
    acceptance_length: AcceptanceLength
    conditional_acceptance: tuple[float | None, ...]  # [D]
    joint_acceptance: tuple[float, ...]  # [D]
    simulated_acceptance_length: float | None  # None: the held-out curve is not of what it proposes
    lossless: Lossless | None
    cost: DraftCost
    training: Training | None  # None: it needs none
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class CompareSettings:
    """How drafts are compared; from `compare:` in the recipe."""

    minutes: float | None
    steps: int | None
    batch_sizes: tuple[int, ...]  # speed is measured at
    speed_prompts: int
    own: Mapping[str, Sequence[str]]  # words of a command line that one draft alone is given

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_sizes", tuple(self.batch_sizes))
        counts = {"speed_prompts": self.speed_prompts, "steps": self.steps}
        counts |= {"batch_sizes": min(self.batch_sizes, default=0)}
        for key, value in counts.items():
            if value is not None and value < 1:
                raise UserError(f"compare.{key}={getattr(self, key)} must be at least 1")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise UserError(f"compare.minutes={self.minutes} must be more than 0")


@dataclass(frozen=True)
class Comparison:
    """compare.json, schema 1."""

    target: str
    prompts: int
    drafts: tuple[ComparedDraft, ...]
    provenance: Provenance
    schema: int = SCHEMA


def compared(
    name: str, report: Report, cost: DraftCost, trained: tuple[Path, Budget] | None
) -> ComparedDraft:
    """The line of one draft, from its report and, where it was `trained`, what that has left in its folder."""
    return ComparedDraft(
        name,
        report.draft,
        report.sampling,
        report.tokens_per_step,
        report.tokens_per_step_ci95,
        report.acceptance_length,
        report.conditional_acceptance,
        report.joint_acceptance,
        report.simulated_acceptance_length,
        report.lossless,
        cost,
        _training(*trained) if trained else None,
        report.warnings,
    )


def compare_drafts(
    reports: Sequence[Report], drafts: Sequence[ComparedDraft], origin: Provenance
) -> Comparison:
    """All lines, on what the reports have in common."""
    first = reports[0]
    return Comparison(first.target, first.counts.prompts, tuple(drafts), origin)


def _training(folder: Path, budget: Budget) -> Training | None:
    record = StageFolder(folder).record()
    if record is None:
        return None
    steps, seconds, tokens, rows = (
        float(record.summary.get(key, 0))
        for key in ("steps", "trained_seconds", "trained_tokens", "supervised_rows")
    )
    return Training(budget, int(steps), seconds, int(tokens), int(rows), _curve(folder))


def _curve(folder: Path) -> tuple[CurvePoint, ...]:
    """The held-out points, with the clock's note of the same step."""
    clock = {row["step"]: row for row in _rows(folder / "clock.csv")}
    points = [row for row in _rows(folder / "metrics.csv") if row.get(LENGTH)]
    return tuple(
        CurvePoint(float(at["seconds"]), int(float(at["tokens"])), float(row[LENGTH]))
        for row in points
        if (at := clock.get(row["step"]))
    )


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def save_comparison(comparison: Comparison, path: Path) -> None:
    """Writes compare.json. Raises ValueError where a figure is NaN or infinite."""
    text = json.dumps(asdict(comparison), indent=2, allow_nan=False, ensure_ascii=False)
    atomic_write(path, text + "\n")


def load_comparison(path: Path) -> Comparison:
    """Reads a compare.json. Raises UserError for an unreadable file or a missing, unknown or mistyped key."""
    try:
        return decode(Comparison, json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as fault:
        raise UserError(f"{path}: no readable comparison ({fault}); run compare again") from fault
