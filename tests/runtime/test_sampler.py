"""Logits to distribution to token."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mtptrain.runtime.sampler import draw, draw_distinct, generator, probabilities, uniforms
from mtptrain.types import SamplingParams, UserError

LOGITS = torch.tensor([[2.0, 0.5, 1.0, -1.0], [0.0, 0.0, 3.0, 0.0]])


def test_temperature_divides_the_logits() -> None:
    """The distribution is softmax(logits / temperature), in fp32 whatever the logits' type."""
    got = probabilities(LOGITS.bfloat16(), SamplingParams(0.5))
    torch.testing.assert_close(got, torch.softmax(LOGITS / 0.5, -1))
    assert got.dtype == torch.float32


def test_top_k_keeps_the_best_and_renormalises() -> None:
    """Exactly the k best tokens keep their ratios; a k above the vocabulary keeps all."""
    got = probabilities(LOGITS, SamplingParams(1.0, top_k=2))
    kept = torch.softmax(torch.tensor([2.0, 1.0]), 0)
    torch.testing.assert_close(got[0], torch.tensor([kept[0], 0, kept[1], 0]))
    whole = probabilities(LOGITS, SamplingParams(1.0, top_k=9))
    torch.testing.assert_close(whole, torch.softmax(LOGITS, -1))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """The token that crosses top_p is kept, those behind it are not; the best one is always kept."""
    probs = torch.tensor([[0.2, 0.45, 0.05, 0.3]])
    got = probabilities(probs.log(), SamplingParams(1.0, top_p=0.5))
    torch.testing.assert_close(got, torch.tensor([[0.0, 0.6, 0.0, 0.4]]))
    greedy = probabilities(probs.log(), SamplingParams(1.0, top_p=1e-6))
    torch.testing.assert_close(greedy, torch.tensor([[0.0, 1.0, 0.0, 0.0]]))


def test_min_p_keeps_what_is_near_the_best() -> None:
    """A token needs its share of the best one's probability, just reaching it is enough; the best is always
    kept, and 0 keeps all."""
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]])
    got = probabilities(probs.log(), SamplingParams(1.0, min_p=0.5))
    torch.testing.assert_close(got, torch.tensor([[2 / 3, 1 / 3, 0.0, 0.0], [0.25] * 4]))
    best = probabilities(probs[:1].log(), SamplingParams(1.0, min_p=1.0))
    torch.testing.assert_close(best, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(probabilities(probs.log(), SamplingParams(1.0)), probs)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_all_options_together_are_those_of_transformers(temperature: float) -> None:
    """temperature, top-k, top-p and min-p, in this order, leave the tokens and the law that its own warpers do."""
    logits = 3 * torch.randn(50, 40, generator=generator(4, 0))
    warpers = [
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(12),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.2),
    ]
    warped = logits
    for warper in warpers:
        warped = warper(torch.zeros(50, 1, dtype=torch.long), warped)
    got = probabilities(logits, SamplingParams(temperature, top_k=12, top_p=0.8, min_p=0.2))
    torch.testing.assert_close(got, warped.softmax(-1))
    assert len(set((got > 0).sum(-1).tolist())) > 2


@pytest.mark.parametrize(
    "wrong",
    [{"min_p": -0.1}, {"min_p": 1.1}, {"top_p": 0.0}, {"top_k": -1}, {"typical_threshold": 1.5}],
)
def test_options_out_of_range_are_one_line(wrong: dict[str, float]) -> None:
    """The message names the option and its value."""
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=f"^{name}={value} must") as caught:
        SamplingParams(1.0, **wrong)  # pyright: ignore
    assert "\n" not in str(caught.value)


def test_draw_inverts_the_distribution() -> None:
    """A uniform number picks the token whose share of [0, 1) it falls in; what has no mass is never drawn,
    and the mass need not be 1."""
    probs = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0]).expand(5, -1)
    u = torch.tensor([0.0, 0.4999, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs, u).tolist() == [1, 1, 3, 4, 4]


def test_draw_follows_its_law() -> None:
    """4,000 draws over the streams of 4,000 requests pass a chi-square test against the distribution."""
    probs = probabilities(torch.randn(8, generator=generator(3, 0)), SamplingParams(0.7))
    u = uniforms([generator(0, place) for place in range(4000)])
    counts = draw(probs.expand(4000, -1), u).bincount(minlength=8)
    expected = probs.double() / probs.double().sum() * 4000
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 0.01


def test_distinct_draws_put_nothing_back() -> None:
    """6,000 ordered pairs pass a chi-square test against q(a) q(b) / (1 - q(a)), and no token comes twice."""
    q, trials = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1]), 6000
    numbers = torch.rand(trials, 2, generator=generator(5, 0), dtype=torch.float64)
    pairs = draw_distinct(q.expand(trials, -1), numbers)
    law = q[:, None] * q[None] / (1 - q[:, None])
    cells = [(a, b) for a in range(5) for b in range(5) if a != b and float(law[a, b]) > 0]
    counts = [int(((pairs[:, 0] == a) & (pairs[:, 1] == b)).sum()) for a, b in cells]
    assert sum(counts) == trials
    expected = torch.tensor([float(law[c]) for c in cells]).double()
    assert stats.chisquare(counts, (expected / expected.sum() * trials).numpy()).pvalue > 0.01


def test_distinct_draws_go_on_where_nothing_is_likely_any_more() -> None:
    """Behind all tokens that have any probability come the others, so that there are always k."""
    q = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5]])
    numbers = torch.rand(2, 4, generator=generator(6, 0), dtype=torch.float64)
    tokens = draw_distinct(q, numbers).tolist()
    assert tokens[0][0] == 1 and set(tokens[1][:2]) == {0, 3}
    assert all(sorted(row) == [0, 1, 2, 3] for row in tokens)


def test_streams_belong_to_request_and_seed() -> None:
    """The same seed and place repeat the same numbers; another seed or place gives others."""
    streams = [generator(s, p) for s, p in ((1, 2), (1, 2), (1, 3), (2, 2))]
    a, b, c, d = uniforms(streams).tolist()
    assert a == b and len({a, c, d}) == 3
    assert uniforms(streams[:1]).item() != a
