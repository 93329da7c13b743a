"""The figures of a validation: these dataclasses are the schema of report.json.

A figure that was not measured is None (null), with its key kept.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mtptrain.run import Provenance
from mtptrain.validate.acceptance import Acceptance, AcceptanceLength, Interval

SCHEMA = 1


@dataclass(frozen=True)
class Sampling:
    """How the run drew its tokens; `tree` names the token tree, None is a chain.

    top_k to typical_alpha are those of `SamplingParams` and mean nothing to a greedy run; min_confidence is that of
    `EngineLimits`.
    """

    temperature: float
    num_draft_tokens: int
    tree: str | None
    seed: int
    batch_size: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    block_verify: bool = False
    typical_threshold: float = 0.0
    typical_alpha: float = 0.3
    min_confidence: float = 0.0

    @property
    def lossless(self) -> bool:
        """Whether what was said follows the target's law."""
        return self.temperature == 0 or self.typical_threshold == 0


@dataclass(frozen=True)
class Baseline:
    """A draft that needs no training, run over the same prompts."""

    tokens_per_step: float | None


@dataclass(frozen=True)
class Baselines:
    """The untrained drafts a trained one has to beat."""

    ngram: Baseline | None = None
    suffix: Baseline | None = None  # the answers given one after another


@dataclass(frozen=True)
class Lossless:
    """Greedy output with the draft held against plain greedy output, token by token."""

    checked_tokens: int
    mismatches: int


@dataclass(frozen=True)
class Speed:
    """Emitted tokens a second, without and with the draft; `draft_share`: part spent proposing."""

    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float
    draft_share: float | None


@dataclass(frozen=True)
class Counts:
    """What the figures rest on; `tokens` are all output tokens."""

    prompts: int
    passes: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The figures of one decoding run: the report's own, or those of its `sampled` block."""

    sampling: Sampling
    acceptance_length: AcceptanceLength
    tokens_per_step: float | None
    tokens_per_step_ci95: Interval | None
    acceptance_rate: float | None
    conditional_acceptance: tuple[float | None, ...]  # [D]
    joint_acceptance: tuple[float, ...]  # [D]
    accepted_histogram: tuple[int, ...]  # [D + 1]
    speed: Speed | None
    counts: Counts


@dataclass(frozen=True, kw_only=True)
class Report(MeasuredRun):
    """report.json, schema 1. None (null) stands for what was not measured."""

    target: str
    draft: str
    baselines: Baselines
    simulated_acceptance_length: float | None
    lossless: Lossless | None
    sampled: MeasuredRun | None
    provenance: Provenance
    warnings: tuple[str, ...] = ()  # what a reader should know before trusting the figures
    schema: int = SCHEMA


def measured_run(acceptance: Acceptance, sampling: Sampling, speed: Speed | None) -> MeasuredRun:
    """Put the acceptance figures of one run beside how it was sampled and how fast it was."""
    return MeasuredRun(
        sampling=sampling,
        acceptance_length=acceptance.acceptance_length,
        tokens_per_step=acceptance.tokens_per_step,
        tokens_per_step_ci95=acceptance.tokens_per_step_ci95,
        acceptance_rate=acceptance.acceptance_rate,
        conditional_acceptance=acceptance.conditional_acceptance,
        joint_acceptance=acceptance.joint_acceptance,
        accepted_histogram=acceptance.accepted_histogram,
        speed=speed,
        counts=Counts(acceptance.prompts, acceptance.passes, acceptance.tokens),
    )


def assemble(
    run: MeasuredRun,
    *,
    target: str,
    draft: str,
    provenance: Provenance,
    baselines: Baselines | None = None,
    simulated_acceptance_length: float | None = None,
    lossless: Lossless | None = None,
    sampled: MeasuredRun | None = None,
    warnings: tuple[str, ...] = (),
) -> Report:
    """The report of `run`, with whatever else was measured; what is left out is null."""
    return Report(
        **{field.name: getattr(run, field.name) for field in fields(MeasuredRun)},
        target=target,
        draft=draft,
        baselines=baselines or Baselines(),
        simulated_acceptance_length=simulated_acceptance_length,
        lossless=lossless,
        sampled=sampled,
        provenance=provenance,
        warnings=warnings,
    )
