"""Verification: the greedy walk, and rejection sampling that leaves the target's law unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from scipy import stats
from torch import Tensor

from mtptrain.runtime.sampler import draw, generator, uniforms
from mtptrain.runtime.verify import verify_greedy, verify_sampled

V, D, TRIALS = 8, 2, 6000


@pytest.mark.parametrize(
    ("chain", "best", "verdict"),
    [
        ((1, 2), [1, 2, 3], (2, 3)),
        ((1, 2), [1, 5, 3], (1, 5)),
        ((1, 2), [4, 2, 3], (0, 4)),
        ((), [6], (0, 6)),
    ],
)
def test_greedy_accepts_up_to_the_first_difference(
    chain: tuple[int, ...], best: list[int], verdict: tuple[int, int]
) -> None:
    """The emitted token is the target's best behind the last accepted one."""
    assert verify_greedy([chain], lambda rows: [best[k] for _, k in rows]) == [verdict]


def test_greedy_asks_for_no_row_behind_the_first_difference() -> None:
    """All chains at once, row by row; a chain that has ended is asked for no more."""
    best, asked = [[1, 2, 3], [1, 5, 3], [4, 2, 3], [6]], []

    def look(rows: Sequence[tuple[int, int]]) -> list[int]:
        asked.append(list(rows))
        return [best[i][k] for i, k in rows]

    chains = [(1, 2), (1, 2), (1, 2), ()]
    assert verify_greedy(chains, look) == [(2, 3), (1, 5), (0, 4), (0, 6)]
    assert asked == [[(0, 0), (1, 0), (2, 0), (3, 0)], [(0, 1), (1, 1)], [(0, 2)]]
    assert verify_greedy([], look) == [] and len(asked) == 3


@dataclass(frozen=True)
class Case:
    """A draft's law at each of D steps, over `vocab` (None: over the whole vocabulary)."""

    probs: Tensor  # [D, Vd]
    vocab: Tensor | None = None


def _law(seed: int, size: int = V, sharpness: float = 1.0) -> Tensor:
    return torch.softmax(sharpness * torch.randn(D + 1, size, generator=generator(seed, 0)), -1)


TARGET = _law(0, sharpness=1.5)
CASES = {
    "good": Case((0.8 * TARGET + 0.2 * _law(1))[:D]),
    "bad": Case(_law(2, sharpness=2.0)[:D]),
    "itself": Case(TARGET[:D]),
    "reduced vocabulary": Case(_law(3, 3)[:D], torch.tensor([1, 4, 6])),
    "outside the target's support": Case(torch.eye(V)[[5, 5]] * 0.5 + 0.5 * _law(4)[:D]),
}


def _emitted(case: Case, target: Tensor, certain: bool = False) -> Counter[tuple[int, ...]]:
    """Everything each of many passes emitted; with `certain` the draft is a point mass at its best token."""
    counts: Counter[tuple[int, ...]] = Counter()
    for place in range(TRIALS):
        stream = generator(10, place)
        if certain:
            index = case.probs.argmax(-1)
        else:
            index = torch.cat([draw(q[None], uniforms([stream])) for q in case.probs])
        chain = (index if case.vocab is None else case.vocab[index]).tolist()
        q = None if certain else case.probs
        accepted, token = verify_sampled(chain, target, q, case.vocab, stream)
        counts[(*chain[:accepted], token)] += 1
    return counts


def _pvalue(counts: Counter[tuple[int, ...]], target: Tensor) -> float:
    """Chi-square of the first emitted token, and of the second one among passes that have it, pooled."""
    observed, expected = [], []
    first = Counter[int]()
    for emitted, n in counts.items():
        first[emitted[0]] += n
    groups = [(target[0], first, TRIALS)]
    second = Counter[int]()
    for emitted, n in counts.items():
        if len(emitted) > 1:
            second[emitted[1]] += n
    groups.append((target[1], second, sum(second.values())))
    for law, seen, total in groups:
        law = law.double() / law.double().sum()
        kept = [x for x in range(V) if float(law[x]) * total > 0]
        assert sum(seen[x] for x in kept) == total, (
            "a token outside the target's support was emitted"
        )
        observed += [seen[x] for x in kept]
        expected += [float(law[x]) * total for x in kept]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return float(stats.chi2.sf(statistic, len(observed) - len([g for g in groups if g[2]])))


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "point mass"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_emitted_follows_the_targets_law(name: str, certain: bool) -> None:
    """6,000 passes pass a chi-square test against the target's own law for any draft: near, far, certain, over
    a reduced vocabulary, or fond of a token that the target never says."""
    target = TARGET.clone()
    if name.startswith("outside"):
        target[:, 5] = 0
        target /= target.sum(-1, keepdim=True)
    assert _pvalue(_emitted(CASES[name], target, certain), target) > 1e-3


def test_acceptance_is_the_overlap_of_both_laws() -> None:
    """The first token is accepted with probability sum min(p, q): 1 where draft and target agree."""
    for case in (CASES["good"], CASES["bad"]):
        overlap = float(torch.minimum(case.probs[0], TARGET[0]).sum())
        held = sum(n for emitted, n in _emitted(case, TARGET).items() if len(emitted) > 1)
        assert abs(held / TRIALS - overlap) < 4 * (overlap * (1 - overlap) / TRIALS) ** 0.5
    itself = _emitted(CASES["itself"], TARGET)
    assert all(len(emitted) == D + 1 for emitted in itself)


def test_a_sequence_draws_only_from_its_own_stream() -> None:
    """One number for every test and one for the emitted token: the stream goes on where it should."""
    stream, twin = generator(0, 0), generator(0, 0)
    accepted, _ = verify_sampled((5, 5), torch.full((3, V), 1 / V), None, None, stream)
    torch.rand(accepted + 2 if accepted < 2 else 3, generator=twin, dtype=torch.float64)
    assert torch.equal(stream.get_state(), twin.get_state())
