"""Acceptance figures against fractions worked out by hand.

Every case is a handful of passes whose counts can be read off the test, so that a wrong figure is
a wrong definition and not a wrong fixture.
"""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest

from mtptrain.types import Completion, Request, UserError, VerifyPass
from mtptrain.validate.acceptance import measure_acceptance, paired_difference


def answer(
    name: str, *passes: tuple[int, int], category: str = "chat", plain: int = 0, cut: int = 0
) -> Completion:
    """An answer of (proposed, accepted) passes and `plain` steps; the last pass loses `cut`."""
    emitted = [accepted + 1 for _, accepted in passes]
    if cut:
        emitted[-1] -= cut
    return Completion(
        request=Request(name, category, (1, 2, 3)),
        output_ids=tuple(range(1 + sum(emitted) + plain)),
        passes=tuple(VerifyPass(p, a, e) for (p, a), e in zip(passes, emitted, strict=True)),
        decode_steps=len(passes) + plain,
        finish_reason="length",
    )


HAND = [
    answer("a", (2, 0), (2, 2), (2, 1), category="code"),
    answer("b", (2, 2), category="chat", cut=2),
]


def many(seed: int = 0, prompts: int = 40, rate: float = 0.5) -> list[Completion]:
    """Answers of random length whose chains of 3 hold with probability `rate` a token."""
    draw = np.random.default_rng(seed)
    answers = []
    for row in range(prompts):
        held = draw.random((draw.integers(2, 30), 3)) < rate
        passes = [(3, int(np.cumprod(chain).sum())) for chain in held]
        answers.append(answer(f"p{row}", *passes, category="even" if row % 2 == 0 else "odd"))
    return answers


def test_figures_equal_hand_counted_fractions() -> None:
    """Two answers of four passes give the fractions worked out on paper."""
    result = measure_acceptance(HAND, 2)
    assert result.acceptance_length.value == 1 + Fraction(5, 4)
    assert result.acceptance_rate == Fraction(5, 8)
    assert result.conditional_acceptance == (3 / 4, 2 / 3)
    assert result.joint_acceptance == pytest.approx((3 / 4, 1 / 2))
    assert result.accepted_histogram == (1, 1, 2)
    assert (result.prompts, result.passes, result.tokens, result.decode_steps) == (2, 4, 9, 4)


def test_pooled_value_is_not_the_mean_of_ratios() -> None:
    """A prompt of one lucky pass weighs one pass in `value` and a whole prompt in the mean."""
    length = measure_acceptance(HAND, 2).acceptance_length
    assert length.value == 2.25
    assert length.per_request_mean == (2 + 3) / 2


def test_cut_pass_keeps_its_accepted_tokens_but_not_its_dropped_ones() -> None:
    """At an answer's end the acceptance length counts what held, tokens a step what was kept."""
    result = measure_acceptance([answer("a", (4, 4), cut=3)], 4)
    assert result.acceptance_length.value == 5
    assert result.tokens_per_step == 2


def test_acceptance_length_is_one_plus_the_sum_of_joint_acceptance() -> None:
    """With full chains, the joint acceptances and the histogram lead to the same value."""
    result = measure_acceptance(many(), 3)
    mean = np.average(range(4), weights=result.accepted_histogram)
    assert result.acceptance_length.value == pytest.approx(1 + sum(result.joint_acceptance))
    assert result.acceptance_length.value == pytest.approx(1 + mean)
    assert sum(result.accepted_histogram) == result.passes


def test_draft_that_seldom_proposes_is_charged_for_its_silent_steps() -> None:
    """Steps without a proposal lower tokens a step, never the acceptance length."""
    sparse = [answer("a", (3, 3), plain=6), answer("b", (1, 0), plain=3), answer("c", plain=5)]
    result = measure_acceptance(sparse, 3)
    assert result.acceptance_length.value == 1 + Fraction(3, 2)
    assert result.acceptance_length.per_request_mean == (4 + 1) / 2  # c has no ratio of its own
    assert result.tokens_per_step == (4 + 6 + 1 + 3 + 5) / 16
    assert result.acceptance_rate == 3 / 4
    assert result.decode_steps == 16


def test_empty_proposal_is_no_pass() -> None:
    """A listed pass that proposed nothing changes no acceptance figure."""
    silent = dataclasses.replace(HAND[0], passes=(*HAND[0].passes, VerifyPass(0, 0, 1)))
    assert measure_acceptance([silent, HAND[1]], 2) == measure_acceptance(HAND, 2)


def test_short_proposals_are_not_misses_at_the_depths_they_never_tried() -> None:
    """Conditional acceptance at k divides only by passes that proposed a k-th token."""
    result = measure_acceptance([answer("a", (1, 1), (1, 1), (3, 2), (2, 0))], 4)
    assert result.conditional_acceptance == (3 / 4, 1, 0, None)
    assert result.joint_acceptance == (3 / 4, 3 / 4, 0, 0)
    assert result.accepted_histogram == (1, 2, 1, 0, 0)


def test_categories_are_pooled_on_their_own_and_sorted() -> None:
    """Each category has the value of its own passes, and their passes add up to all."""
    by_category = measure_acceptance(HAND, 2).acceptance_length.by_category
    assert list(by_category) == ["chat", "code"]
    assert (by_category["chat"].value, by_category["chat"].passes) == (3, 1)
    assert (by_category["code"].value, by_category["code"].passes) == (2, 3)
    assert by_category["code"].ci95 is None  # one prompt


def test_intervals_bracket_their_values_and_repeat() -> None:
    """Every interval lies around its value, and the same seed gives the same interval."""
    result = measure_acceptance(many(), 3)
    length = result.acceptance_length
    pairs = [(length.value, length.ci95), (result.tokens_per_step, result.tokens_per_step_ci95)]
    pairs += [(part.value, part.ci95) for part in length.by_category.values()]
    for value, interval in pairs:
        assert value is not None and interval is not None
        assert interval[0] < value < interval[1]
    assert measure_acceptance(many(), 3) == result
    assert measure_acceptance(many(), 3, seed=1).acceptance_length.ci95 != length.ci95


def test_interval_has_the_width_of_the_spread_between_prompts() -> None:
    """The interval is as wide as the standard error of a quotient of prompt sums says."""
    answers = many(prompts=400)
    counts = np.array([(sum(p.accepted for p in a.passes), len(a.passes)) for a in answers])
    ratio = counts[:, 0].sum() / counts[:, 1].sum()
    residual = counts[:, 0] - ratio * counts[:, 1]
    width = 2 * 1.96 * np.sqrt((residual**2).sum()) / counts[:, 1].sum()
    low, high = measure_acceptance(answers, 3).acceptance_length.ci95 or (0.0, 0.0)
    assert high - low == pytest.approx(width, rel=0.08)


def test_nothing_measured_is_none_and_zero_and_strict_json() -> None:
    """Without completions, or without one proposal, quotients are None and counts are zero."""
    for completions in ([], [answer("a"), answer("b", plain=4)]):
        result = measure_acceptance(completions, 2)
        assert result.acceptance_length.value is None and result.acceptance_length.ci95 is None
        assert result.conditional_acceptance == (None, None)
        assert result.joint_acceptance == (0, 0)
        assert result.accepted_histogram == (0, 0, 0)
        json.dumps(dataclasses.asdict(result), allow_nan=False)
    assert measure_acceptance([answer("b", plain=4)], 2).tokens_per_step == 1


def test_impossible_counts_are_refused() -> None:
    """A pass cannot accept more than it proposed or more than D."""
    with pytest.raises(ValueError, match="accepted=3"):
        measure_acceptance([answer("a", (2, 3))], 4)
    with pytest.raises(ValueError, match="D=1"):
        measure_acceptance([answer("a", (2, 2))], 1)


def test_paired_difference_is_exact_and_tighter_than_two_intervals() -> None:
    """Over the same prompts the difference is that of the values, and its interval the narrower."""
    better = many(rate=0.6)
    worse = [dataclasses.replace(a, passes=a.passes[:1] + a.passes) for a in better]
    difference = paired_difference(better, worse[::-1])
    ours, theirs = (measure_acceptance(side, 3).acceptance_length for side in (better, worse))
    assert difference.prompts == 40
    assert ours.value is not None and theirs.value is not None
    assert difference.value == pytest.approx(ours.value - theirs.value)
    low, high = difference.ci95 or (0.0, 0.0)
    assert ours.ci95 is not None and high - low < ours.ci95[1] - ours.ci95[0]
    assert low <= ours.value - theirs.value <= high


def test_paired_difference_of_a_run_with_itself_is_zero() -> None:
    """The same run on both sides differs by nothing, in any resample."""
    same = paired_difference(many(), many())
    assert (same.value, same.ci95) == (0, (0, 0))


def test_paired_difference_refuses_other_prompts() -> None:
    """Two runs over different prompts are not paired."""
    with pytest.raises(UserError, match="different prompts"):
        paired_difference(many(prompts=3), many(prompts=4))
    assert paired_difference([], []).value is None
