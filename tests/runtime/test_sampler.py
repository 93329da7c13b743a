"""Logits to distribution to token."""

from __future__ import annotations

import torch
from scipy import stats

from mtptrain.runtime.sampler import draw, generator, probabilities, uniforms
from mtptrain.types import SamplingParams

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


def test_streams_belong_to_request_and_seed() -> None:
    """The same seed and place repeat the same numbers; another seed or place gives others."""
    streams = [generator(s, p) for s, p in ((1, 2), (1, 2), (1, 3), (2, 2))]
    a, b, c, d = uniforms(streams).tolist()
    assert a == b and len({a, c, d}) == 3
    assert uniforms(streams[:1]).item() != a
