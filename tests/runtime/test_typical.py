"""Typical acceptance: what it lets pass, and that it says so of itself."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mtptrain.runtime.sampler import generator
from mtptrain.runtime.tree import ROOT, Tree, chain
from mtptrain.runtime.typical import typical_part, verify_typical
from mtptrain.types import SamplingParams, UserError

V = 7
HOW = (0.09, 0.3)  # Medusa's own
BUSH = Tree((1, 4, 1, 2, 1, 6, 3), (ROOT, ROOT, 0, 0, 1, 4, 4))


def _laws(seed: int, rows: int, sharpness: float = 1.0) -> Tensor:
    logits = torch.randn(rows, V, generator=generator(seed, 0))
    return torch.softmax(sharpness * logits, -1)


def _bound(law: list[float], threshold: float, alpha: float) -> float:
    entropy = -sum(p * math.log(p) for p in law if p > 0)
    return min(threshold, alpha * math.exp(-entropy))


@pytest.mark.parametrize("how", [HOW, (0.3, 0.09), (1.0, 0.99)], ids=str)
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
def test_typical_is_what_exceeds_the_bound_of_its_own_law(
    sharpness: float, how: tuple[float, float]
) -> None:
    """Number by number: p(x) > min(threshold, alpha exp(-H)); what is kept keeps its probability; the best token
    of any law is typical, a certain one and an even one included."""
    laws = torch.cat([_laws(1, 40, sharpness), torch.eye(V)[:1], torch.full((1, V), 1 / V)])
    part = typical_part(laws, *how)
    for law, kept in zip(laws.tolist(), part.tolist(), strict=True):
        bound = _bound(law, *how)
        assert kept == pytest.approx([p if p > bound else 0.0 for p in law])
        assert kept[law.index(max(law))] > 0


def _slow(tree: Tree, laws: Tensor) -> list[int]:
    """The longest path whose every token is typical, of equals the likeliest, by looking at every path."""
    best: tuple[int, float, list[int]] = (0, 0.0, [])
    for node in range(len(tree.parents)):
        path, at = [], node
        while at != ROOT:
            path, at = [at, *path], tree.parents[at]
        steps = [(laws[a + 1].tolist(), tree.token_ids[b]) for a, b in pairwise([ROOT, *path])]
        if all(law[token] > _bound(law, *HOW) for law, token in steps):
            score = sum(math.log(law[token]) for law, token in steps)
            best = max(best, (len(path), score, path))
    return best[2]


def test_the_longest_typical_path_is_taken_and_of_equals_the_likeliest() -> None:
    """200 laws on one bush, against a search over all paths; every depth is met, and the next token is typical
    where the path ends."""
    depths = set[int]()
    for seed in range(200):
        laws = _laws(seed, 1 + len(BUSH.parents), 1.5)
        path, token = verify_typical(BUSH, laws, *HOW, generator(2, seed))
        assert path == _slow(BUSH, laws)
        law = laws[path[-1] + 1 if path else 0].tolist()
        assert law[token] > _bound(law, *HOW)
        depths.add(len(path))
    assert depths == {0, 1, 2, 3}


def test_a_chain_and_nothing_at_all_are_trees_too() -> None:
    """A chain ends before its first token that is not typical; an empty one says a typical token; one number is
    drawn either way."""
    laws = torch.tensor([[0.5, 0.5, 0, 0], [0.98, 0.02, 0, 0], [0.25, 0.25, 0.25, 0.25]])
    for tokens, held in (((0, 0), 2), ((1, 1), 1), ((2, 0), 0), ((), 0)):
        stream, twin = generator(0, 0), generator(0, 0)
        path, token = verify_typical(chain(tokens), laws[: len(tokens) + 1], *HOW, stream)
        assert path == list(range(held))
        assert token in ([0, 1], [0], [0, 1, 2, 3])[held]
        torch.rand(1, generator=twin, dtype=torch.float64)
        assert torch.equal(stream.get_state(), twin.get_state())


def test_it_counts_as_lossless_at_temperature_0_only() -> None:
    """There tokens are the target's best ones; above it whoever asks for it is told that it is not."""
    assert SamplingParams(1.0).lossless and SamplingParams(0.0, typical_threshold=0.09).lossless
    assert not SamplingParams(0.7, typical_threshold=0.09).lossless


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"typical_threshold": -0.1}, "typical_threshold=-0.1 must lie"),
        ({"typical_threshold": 0.1, "typical_alpha": 1.0}, "typical_alpha=1.0 between"),
        ({"typical_threshold": 0.1, "block_verify": True}, "choose one"),
    ],
)
def test_options_that_cannot_be_are_one_line(options: dict[str, float], line: str) -> None:
    """An alpha of 1 would find nothing typical in an even law."""
    with pytest.raises(UserError, match=line) as caught:
        SamplingParams(1.0, **options)  # pyright: ignore
    assert "\n" not in str(caught.value)
