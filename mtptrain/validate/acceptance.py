"""Acceptance figures from the verify passes of a real decoding run.

Every figure is a quotient of two counts pooled over all passes, as the serving engines' counters
give it: a mean of ratios weighs a prompt of three passes like one of three hundred, so the only one
kept says so in its name (`per_request_mean`). Intervals resample prompts, not passes, because the
passes of one answer are alike. A quotient with nothing to divide by is None, never NaN and never a
made-up 1. Given up: the percentile bootstrap runs a little narrow on a handful of prompts, and a
single prompt has no interval at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt

from mtptrain.types import Completion, UserError, VerifyPass

RESAMPLES = 2000

Interval = tuple[float, float]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CategoryAcceptance:
    """Acceptance length of one category, pooled over its `passes`."""

    value: float | None
    ci95: Interval | None
    passes: int


@dataclass(frozen=True)
class AcceptanceLength:
    """1 + accepted tokens over verify passes; `per_request_mean` averages the requests' own."""

    value: float | None
    ci95: Interval | None
    per_request_mean: float | None
    by_category: dict[str, CategoryAcceptance]


@dataclass(frozen=True)
class Acceptance:
    """All acceptance figures of one run with D = num_draft_tokens; None where nothing was counted.

    `tokens` are all output tokens, the first one of each answer (from prefill) included;
    `tokens_per_step` leaves that one out and divides by all `decode_steps`, those without a
    proposal included.
    """

    acceptance_length: AcceptanceLength
    tokens_per_step: float | None
    tokens_per_step_ci95: Interval | None
    acceptance_rate: float | None
    conditional_acceptance: tuple[float | None, ...]  # [D]
    joint_acceptance: tuple[float, ...]  # [D]
    accepted_histogram: tuple[int, ...]  # [D + 1]
    prompts: int
    passes: int
    tokens: int
    decode_steps: int


@dataclass(frozen=True)
class PairedDifference:
    """Acceptance length of one run minus that of another over the same prompts."""

    value: float | None
    ci95: Interval | None
    prompts: int


def measure_acceptance(
    completions: Sequence[Completion], num_draft_tokens: int, seed: int = 0
) -> Acceptance:
    """Pool the verify passes of `completions`; `seed` draws the 2,000 resamples of prompts.

    A pass cut by the end of its answer counts with `accepted` as the engine counted it. Raises
    ValueError where a pass accepted more than it proposed or than num_draft_tokens.
    """
    passes = [step for completion in completions for step in _proposing(completion)]
    _check(passes, num_draft_tokens)
    proposed = np.array([step.proposed for step in passes], np.int64)  # [P]
    accepted = np.array([step.accepted for step in passes], np.int64)  # [P]
    conditional = _conditional(proposed, accepted, num_draft_tokens)
    steps = _step_counts(completions)
    return Acceptance(
        acceptance_length=_acceptance_length(completions, seed),
        tokens_per_step=_quotient(steps.sum(axis=0)),
        tokens_per_step_ci95=_interval(steps, seed),
        acceptance_rate=_quotient(np.array([accepted.sum(), proposed.sum()])),
        conditional_acceptance=conditional,
        # A depth that no pass tried was reached by none: it ends the product at 0.
        joint_acceptance=tuple(accumulate((rate or 0.0 for rate in conditional), mul)),
        accepted_histogram=tuple(np.bincount(accepted, minlength=num_draft_tokens + 1).tolist()),
        prompts=len(completions),
        passes=len(passes),
        tokens=sum(len(completion.output_ids) for completion in completions),
        decode_steps=int(steps[:, 1].sum()),
    )


def paired_difference(
    a: Sequence[Completion], b: Sequence[Completion], seed: int = 0
) -> PairedDifference:
    """Acceptance length of `a` minus that of `b`, each resample drawing the same prompts for both.

    Far tighter than two intervals side by side, since hard prompts are hard for both. Raises
    UserError where the two did not run the same prompts (by request id; their order is free).
    """
    a, b = _in_order(a), _in_order(b)
    if [c.request.id for c in a] != [c.request.id for c in b]:
        raise UserError(
            f"paired difference: {len(a)} and {len(b)} completions of different prompts; "
            "validate both drafts on the same prompts file"
        )
    left, right = _pass_counts(a), _pass_counts(b)
    drawn = _resample(np.concatenate([left, right], axis=1), seed)  # [2000, 4]
    spread = _quotients(drawn[:, :2]) - _quotients(drawn[:, 2:])
    enough = min(_with_counts(left), _with_counts(right)) > 1
    of_a, of_b = _quotient(left.sum(axis=0)), _quotient(right.sum(axis=0))
    return PairedDifference(
        value=None if of_a is None or of_b is None else of_a - of_b,
        ci95=_percentiles(spread) if enough else None,
        prompts=len(a),
    )


def _in_order(completions: Sequence[Completion]) -> list[Completion]:
    return sorted(completions, key=lambda completion: completion.request.id)


def _acceptance_length(completions: Sequence[Completion], seed: int) -> AcceptanceLength:
    pooled = _pooled(completions, seed)
    own = _quotients(_pass_counts(completions))  # [N], NaN where a request had no pass
    own = own[~np.isnan(own)]
    of_category: dict[str, list[Completion]] = {}
    for completion in completions:
        of_category.setdefault(completion.request.category, []).append(completion)
    return AcceptanceLength(
        value=pooled.value,
        ci95=pooled.ci95,
        per_request_mean=1 + float(own.mean()) if own.size else None,
        by_category={name: _pooled(of_category[name], seed) for name in sorted(of_category)},
    )


def _pooled(completions: Sequence[Completion], seed: int) -> CategoryAcceptance:
    counts = _pass_counts(completions)
    extra, spread = _quotient(counts.sum(axis=0)), _interval(counts, seed)
    return CategoryAcceptance(
        value=None if extra is None else 1 + extra,
        ci95=None if spread is None else (1 + spread[0], 1 + spread[1]),
        passes=int(counts[:, 1].sum()),
    )


def _conditional(proposed: Ints, accepted: Ints, depth: int) -> tuple[float | None, ...]:
    """At k: passes that accept >= k over those that accept >= k - 1 and proposed a k-th token."""
    k = np.arange(1, depth + 1)[:, None]  # [D, 1] against [P]
    held = (accepted >= k).sum(axis=1)
    tried = ((accepted >= k - 1) & (proposed >= k)).sum(axis=1)
    return tuple(_quotient(pair) for pair in np.stack([held, tried], axis=1))


def _proposing(completion: Completion) -> list[VerifyPass]:
    """The verify passes; a step without a proposal is none, whoever lists it."""
    return [step for step in completion.passes if step.proposed > 0]


def _check(passes: Sequence[VerifyPass], depth: int) -> None:
    for step in passes:
        if not 0 <= step.accepted <= min(step.proposed, depth):
            raise ValueError(f"{step} cannot be: at most min(proposed, D={depth}) can be accepted")


def _pass_counts(completions: Sequence[Completion]) -> Ints:
    """Accepted tokens and verify passes of each prompt. [N, 2]"""
    passes = [_proposing(completion) for completion in completions]
    rows = [(sum(step.accepted for step in own), len(own)) for own in passes]
    return np.array(rows, np.int64).reshape(-1, 2)


def _step_counts(completions: Sequence[Completion]) -> Ints:
    """Tokens emitted after prefill's one, and decode steps, of each prompt. [N, 2]"""
    rows = [(max(len(c.output_ids) - 1, 0), c.decode_steps) for c in completions]
    return np.array(rows, np.int64).reshape(-1, 2)


def _resample(counts: Ints, seed: int) -> Ints:
    """Sums of `counts` [N, C] over 2,000 draws of N prompts with replacement. [2000, C]"""
    prompts = len(counts)
    if prompts == 0:
        return np.zeros((RESAMPLES, counts.shape[1]), np.int64)
    generator = np.random.default_rng(seed)
    times_drawn = generator.multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES)
    return times_drawn @ counts  # [2000, N] @ [N, C]


def _interval(counts: Ints, seed: int) -> Interval | None:
    """95 % interval of the pooled quotient of `counts` [N, 2]; None for fewer than two prompts."""
    enough = _with_counts(counts) > 1
    return _percentiles(_quotients(_resample(counts, seed))) if enough else None


def _with_counts(counts: Ints) -> int:
    """How many prompts have anything to divide by."""
    return int(np.count_nonzero(counts[:, 1]))


def _percentiles(values: Floats) -> Interval | None:
    """A draw in which no prompt had anything to count says nothing and is left out."""
    values = values[~np.isnan(values)]
    if values.size == 0:
        return None
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def _quotients(counts: Ints) -> Floats:
    """Row-wise counts[:, 0] / counts[:, 1], NaN where the divisor is 0; stays inside this file."""
    top, bottom = counts[:, 0], counts[:, 1]
    return np.divide(top, bottom, out=np.full(len(counts), np.nan), where=bottom > 0)


def _quotient(pair: Ints) -> float | None:
    return float(pair[0] / pair[1]) if pair[1] > 0 else None
