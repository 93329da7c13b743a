"""Verification: the greedy walk, and rejection sampling that leaves the target's law unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from scipy import stats
from torch import Tensor

from mtptrain.runtime.sampler import draw, draw_distinct, generator, uniforms
from mtptrain.runtime.tree import ROOT, Tree
from mtptrain.runtime.verify import (
    say_drawn,
    say_sampled,
    verify_block,
    verify_greedy,
    verify_sampled,
    verify_trees,
)

V, D, TRIALS = 8, 2, 6000
Verify = Callable[..., tuple[int, int]]
every_verify = pytest.mark.parametrize(
    "verify", [verify_sampled, verify_block], ids=["token by token", "as a block"]
)


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


def _emitted(
    case: Case, target: Tensor, certain: bool = False, verify: Verify = verify_sampled
) -> Counter[tuple[int, ...]]:
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
        accepted, token = verify(chain, target, q, case.vocab, stream)
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


@every_verify
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "point mass"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_emitted_follows_the_targets_law(name: str, certain: bool, verify: Verify) -> None:
    """6,000 passes pass a chi-square test against the target's own law for any draft: near, far, certain, over
    a reduced vocabulary, or fond of a token that the target never says."""
    target = TARGET.clone()
    if name.startswith("outside"):
        target[:, 5] = 0
        target /= target.sum(-1, keepdim=True)
    assert _pvalue(_emitted(CASES[name], target, certain, verify), target) > 1e-3


def test_acceptance_is_the_overlap_of_both_laws() -> None:
    """The first token is accepted with probability sum min(p, q): 1 where draft and target agree."""
    for case in (CASES["good"], CASES["bad"]):
        overlap = float(torch.minimum(case.probs[0], TARGET[0]).sum())
        held = sum(n for emitted, n in _emitted(case, TARGET).items() if len(emitted) > 1)
        assert abs(held / TRIALS - overlap) < 4 * (overlap * (1 - overlap) / TRIALS) ** 0.5
    itself = _emitted(CASES["itself"], TARGET)
    assert all(len(emitted) == D + 1 for emitted in itself)


K, LONG = 3, 3  # tokens and draft length of laws that depend on all that came before
Laws = dict[tuple[int, ...], Tensor]


def _laws(seed: int, sharpness: float) -> Laws:
    """A law of the next token [K] for every text of up to LONG tokens."""
    texts = [t for n in range(LONG + 1) for t in product(range(K), repeat=n)]
    stream = generator(seed, 0)
    return {t: torch.softmax(sharpness * torch.randn(K, generator=stream), -1) for t in texts}


def _said(law: Tensor, stream: torch.Generator) -> int:
    return int(draw(law[None], uniforms([stream])))


def _passes(
    target: Laws, draft: Laws, verify: Verify, certain: bool = False
) -> list[tuple[int, tuple[int, ...]]]:
    """(accepted, text) of many passes; a text goes on after its pass with the target's own tokens."""
    done = []
    for place in range(TRIALS):
        stream, chain = generator(20, place), ()
        for _ in range(LONG):
            law = draft[chain]
            chain += (int(law.argmax()) if certain else _said(law, stream),)
        p = torch.stack([target[chain[:i]] for i in range(LONG + 1)])
        q = None if certain else torch.stack([draft[chain[:i]] for i in range(LONG)])
        accepted, token = verify(chain, p, q, None, stream)
        text = (*chain[:accepted], token)
        while len(text) < LONG + 1:
            text += (_said(target[text], stream),)
        done.append((accepted, text))
    return done


@every_verify
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "point mass"])
def test_a_whole_block_follows_the_targets_joint_law(certain: bool, verify: Verify) -> None:
    """Where both laws depend on the tokens before, all four tokens together pass a chi-square test: 81 texts."""
    target, draft = _laws(5, 1.0), _laws(6, 0.7)
    seen = Counter(text for _, text in _passes(target, draft, verify, certain))
    texts = list(product(range(K), repeat=LONG + 1))
    law = torch.tensor([[float(target[t[:i]][t[i]]) for i in range(LONG + 1)] for t in texts])
    expected = law.double().prod(-1)
    expected = expected / expected.sum() * TRIALS
    rare = expected < 5
    observed = torch.tensor([float(seen[t]) for t in texts]).double()
    cells = [torch.cat([x[~rare], x[rare].sum()[None]]).numpy() for x in (observed, expected)]
    assert stats.chisquare(*cells).pvalue > 1e-3


def test_a_block_accepts_no_less_than_token_by_token() -> None:
    """Over the same drafts: as many tokens or more on average, to within chance, for near and far drafts, and
    clearly more where there is something to make up for. Two tokens of laws (1/3, 2/3) and (2/3, 1/3) are the
    paper's example: 10/9 accepted one by one, 11/9 as a block."""
    for target, draft in ((_laws(5, 1.0), _laws(6, 0.7)), (_laws(7, 0.5), _laws(8, 2.0))):
        one, block = (
            [a for a, _ in _passes(target, draft, v)] for v in (verify_sampled, verify_block)
        )
        assert sum(block) > sum(one) - 2 * TRIALS**0.5
    p, q = torch.tensor([[1 / 3, 2 / 3]] * 3), torch.tensor([[2 / 3, 1 / 3]] * 2)
    for verify, mean in ((verify_sampled, 10 / 9), (verify_block, 11 / 9)):
        total = 0
        for place in range(TRIALS):
            stream = generator(30, place)
            chain = [_said(law, stream) for law in q]
            total += verify(chain, p, q, None, stream)[0]
        assert abs(total / TRIALS - mean) < 4 * (0.8 / TRIALS) ** 0.5


def test_a_block_of_no_tokens_is_a_token_of_the_target() -> None:
    """An empty chain accepts nothing and emits from the target's law; a hopeless one never holds; the draft
    that is the target holds whole."""
    only = torch.tensor([[0.0, 1.0, 0.0]])
    assert verify_block((), only, None, None, generator(0, 0)) == (0, 1)
    for place in range(20):
        assert verify_block((0, 2), only.expand(3, -1), None, None, generator(1, place)) == (0, 1)
        assert verify_block((1, 1), only.expand(3, -1), None, None, generator(1, place)) == (2, 1)
        assert verify_block((1, 2), only.expand(3, -1), None, None, generator(1, place)) == (1, 1)


def test_a_block_draws_a_number_a_token_and_one() -> None:
    """Whatever is accepted, the stream goes on at the same place."""
    stream, twin = generator(0, 0), generator(0, 0)
    verify_block((5, 5), torch.full((3, V), 1 / V), None, None, stream)
    torch.rand(3, generator=twin, dtype=torch.float64)
    assert torch.equal(stream.get_state(), twin.get_state())


def test_a_sequence_draws_only_from_its_own_stream() -> None:
    """One number for every test and one for the emitted token: the stream goes on where it should."""
    stream, twin = generator(0, 0), generator(0, 0)
    accepted, _ = verify_sampled((5, 5), torch.full((3, V), 1 / V), None, None, stream)
    torch.rand(accepted + 2 if accepted < 2 else 3, generator=twin, dtype=torch.float64)
    assert torch.equal(stream.get_state(), twin.get_state())


# ---- trees -----------------------------------------------------------------------------------------------

BUSH = Tree((1, 4, 1, 2, 1, 6, 3), (ROOT, ROOT, 0, 0, 1, 4, 4))


@pytest.mark.parametrize(
    ("best", "verdict"),
    [
        ([1, 2, 0, 0, 7, 0, 0, 0], ([0, 3], 7)),  # rows: the root's, then the nodes'
        ([4, 0, 1, 0, 0, 6, 5, 0], ([1, 4, 5], 5)),
        ([2, 1, 1, 1, 1, 1, 1, 1], ([], 2)),
        ([1, 6, 0, 0, 0, 0, 0, 0], ([0], 6)),
    ],
)
def test_greedy_takes_the_longest_path_that_the_target_says(
    best: list[int], verdict: tuple[list[int], int]
) -> None:
    """Among all paths from the root whose every token is the best behind the one before, the longest; the
    emitted token is the best at its end."""

    def holds(path: list[int]) -> bool:
        rows = [0, *(node + 1 for node in path)]
        return all(BUSH.token_ids[node] == best[row] for node, row in zip(path, rows, strict=False))

    paths = [[]]
    for node, parent in enumerate(BUSH.parents):
        paths.append([*(paths[parent + 1]), node])
    longest = max(filter(holds, paths), key=len)
    assert longest == verdict[0]
    assert verify_trees([BUSH], lambda rows: [best[k] for _, k in rows]) == [verdict]


def test_trees_ask_for_rows_on_their_path_only() -> None:
    """All trees at once, level by level; an empty tree asks once, for its root."""
    best, asked = [[4, 0, 9, 0, 0, 0, 0, 0], [6]], []

    def look(rows: Sequence[tuple[int, int]]) -> list[int]:
        asked.append(list(rows))
        return [best[i][k] for i, k in rows]

    assert verify_trees([BUSH, Tree((), ())], look) == [([1], 9), ([], 6)]
    assert asked == [[(0, 0), (1, 0)], [(0, 2)]]


def test_a_chain_verified_as_a_tree_is_the_chain() -> None:
    """Tree and chain agree wherever the first difference is."""
    chain = (3, 5, 5)
    tree = Tree(chain, (ROOT, 0, 1))
    for best in ([3, 5, 5, 1], [3, 5, 1, 1], [3, 2, 5, 1], [0, 5, 5, 1]):
        ((accepted, token),) = verify_greedy([chain], lambda rows, b=best: [b[k] for _, k in rows])
        ((path, same),) = verify_trees([tree], lambda rows, b=best: [b[k] for _, k in rows])
        assert (path, same) == (list(range(accepted)), token)


TREES = {
    "bush": BUSH,
    "every token": Tree(tuple(range(V)), (ROOT,) * V),
    "chain": Tree((1, 1), (ROOT, 0)),
    "nothing": Tree((), ()),
}


@pytest.mark.parametrize("certain", [False, True], ids=["sampled", "one token is certain"])
@pytest.mark.parametrize("name", TREES)
def test_what_a_tree_emits_follows_the_targets_law(name: str, certain: bool) -> None:
    """12,000 walks pass a chi-square test: the first emitted token against the root's law, and behind each
    accepted node the next one against that node's own."""
    tree = TREES[name]
    laws = torch.softmax(1.5 * torch.randn(len(tree.parents) + 1, V, generator=generator(7, 0)), -1)
    if certain:
        laws[0] = torch.eye(V)[4]
    seen: dict[int, Counter[int]] = {}
    for place in range(2 * TRIALS):
        stream = generator(11, place)

        def says(rows: Sequence[tuple[int, int]], stream: torch.Generator = stream) -> list[int]:
            return [
                say_sampled(laws[k], list(tree.children.get(k - 1, {})), stream) for _, k in rows
            ]

        ((path, token),) = verify_trees([tree], says)
        rows = [0, *(node + 1 for node in path)]
        for row, said in zip(rows, [*(tree.token_ids[x] for x in path), token], strict=True):
            seen.setdefault(row, Counter())[said] += 1
    for row, counts in seen.items():
        total = sum(counts.values())
        law = laws[row].double() / laws[row].double().sum()
        likely = [x for x in range(V) if float(law[x]) > 0]
        assert set(counts) <= set(likely)
        if len(likely) > 1 and total > 300:
            expected = [float(law[x]) * total for x in likely]
            observed = [counts[x] for x in likely]
            scale = sum(observed) / sum(expected)
            assert stats.chisquare(observed, [e * scale for e in expected]).pvalue > 1e-3
    inner = {p + 1 for p in tree.parents if p != ROOT}
    assert certain or inner <= set(seen)


def test_a_node_goes_on_with_the_mass_of_all_its_children() -> None:
    """Acceptance at a node is the sum of its children's probabilities, in whatever order they are tried."""
    law = torch.softmax(torch.randn(V, generator=generator(8, 0)), -1)
    children = [6, 1, 3]
    mass = float(law[children].sum())
    for order in (children, children[::-1]):
        says = [say_sampled(law, order, generator(12, i)) for i in range(TRIALS)]
        share = sum(x in children for x in says) / TRIALS
        assert abs(share - mass) < 4 * (mass * (1 - mass) / TRIALS) ** 0.5


def test_a_tree_draws_one_number_for_every_test_and_one_for_the_token() -> None:
    """The stream of a sequence goes on where it should, wherever the walk ended."""
    law = torch.tensor([0.5, 0.25, 0.25])
    for place in range(20):
        stream, twin = generator(0, place), generator(0, place)
        said = say_sampled(law, [2, 1], stream)
        numbers = {2: 1, 1: 2, 0: 3}[said]
        torch.rand(numbers, generator=twin, dtype=torch.float64)
        assert torch.equal(stream.get_state(), twin.get_state())


# ---- children drawn from the draft's law ------------------------------------------------------------------


def _drawn_children(
    q: Tensor, vocab: Tensor | None, count: int, stream: torch.Generator
) -> list[int]:
    numbers = torch.rand(1, count, generator=stream, dtype=torch.float64)
    index = draw_distinct(q[None], numbers)[0]
    return (index if vocab is None else vocab[index]).tolist()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_what_is_said_behind_drawn_children_follows_the_targets_law(name: str, count: int) -> None:
    """6,000 nodes whose children were drawn without putting back pass a chi-square test against the target's
    own law, for any draft: near, far, over a reduced vocabulary, or fond of a token the target never says."""
    case, law = CASES[name], TARGET[0].double()
    if name.startswith("outside"):
        law[5] = 0
    law = law / law.sum()
    seen = Counter[int]()
    for place in range(TRIALS):
        stream = generator(40, place)
        children = _drawn_children(case.probs[0], case.vocab, count, stream)
        seen[say_drawn(law, children, case.probs[0], case.vocab, stream)] += 1
    likely = [x for x in range(V) if float(law[x]) > 0]
    assert set(seen) <= set(likely)
    expected = [float(law[x]) * TRIALS for x in likely]
    assert stats.chisquare([seen[x] for x in likely], expected).pvalue > 1e-3


def test_of_drawn_children_more_are_accepted_the_more_there_are() -> None:
    """One child is accepted with probability sum min(p, q), as in a chain; with every token as a child one surely
    is; and where the draft is the target the first one is."""
    p, q = TARGET[0], CASES["bad"].probs[0]
    shares = []
    for count in (1, 2, 4, V):
        held = 0
        for place in range(TRIALS):
            stream = generator(41, place)
            children = _drawn_children(q, None, count, stream)
            held += say_drawn(p, children, q, None, stream) in children
        shares.append(held / TRIALS)
    overlap = float(torch.minimum(p, q).sum())
    assert abs(shares[0] - overlap) < 4 * (overlap * (1 - overlap) / TRIALS) ** 0.5
    assert shares == sorted(shares) and shares[-1] == 1
    for place in range(200):
        stream = generator(42, place)
        children = _drawn_children(p, None, 3, stream)
        assert say_drawn(p, children, p, None, stream) == children[0]


def test_children_behind_all_that_the_draft_would_say_are_certain() -> None:
    """A draft with two likely tokens and four children: the last two are tried as certain ones, and the law holds."""
    q = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0, 0])
    law, seen = TARGET[0], Counter[int]()
    for place in range(TRIALS):
        stream = generator(43, place)
        children = _drawn_children(q, None, 4, stream)
        assert sorted(children[:2]) == [0, 1] and len(set(children)) == 4
        seen[say_drawn(law, children, q, None, stream)] += 1
    expected = (law.double() / law.double().sum() * TRIALS).tolist()
    assert stats.chisquare([seen[x] for x in range(V)], expected).pvalue > 1e-3


def test_a_tree_of_drawn_children_follows_the_targets_joint_law() -> None:
    """Two levels of drawn children, laws that depend on the token before: all pairs of tokens together pass a
    chi-square test, though a pass says one or two of them."""
    target, draft, counts = _laws(5, 1.0), _laws(6, 1.5), Counter[tuple[int, ...]]()
    for place in range(2 * TRIALS):
        stream, tokens, parents = generator(44, place), list[int](), list[int]()
        first = _drawn_children(draft[()], None, 2, stream)
        for node, token in ((ROOT, ()), (0, tuple(first[:1])), (1, tuple(first[1:]))):
            mine = first if node == ROOT else _drawn_children(draft[token], None, 2, stream)
            tokens += mine
            parents += [node] * 2
        tree = Tree(tuple(tokens), tuple(parents))

        def says(
            rows: Sequence[tuple[int, int]], tree: Tree = tree, stream: torch.Generator = stream
        ) -> list[int]:
            ((_, k),) = rows
            path = tuple(tree.token_ids[x] for x in tree.path(k - 1))
            children = list(tree.children.get(k - 1, {}))
            if not children:
                return [say_sampled(target[path], [], stream)]
            return [say_drawn(target[path], children, draft[path], None, stream)]

        ((path, token),) = verify_trees([tree], says)
        text = (*(tree.token_ids[x] for x in path), token)
        while len(text) < 2:
            text += (_said(target[text], stream),)
        counts[text[:2]] += 1
    pairs = list(product(range(K), repeat=2))
    law = torch.tensor([float(target[()][a] * target[(a,)][b]) for a, b in pairs]).double()
    expected = (law / law.sum() * 2 * TRIALS).tolist()
    assert stats.chisquare([counts[x] for x in pairs], expected).pvalue > 1e-3


def test_drawn_children_take_one_number_for_every_test_and_one_for_the_token() -> None:
    """As certain ones do: the stream of a sequence goes on where it should."""
    law, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.0, 0.0, 1.0])
    for place in range(20):
        stream, twin = generator(0, place), generator(0, place)
        said = say_drawn(law, [2, 1], q, None, stream)
        numbers = {2: 1, 1: 2, 0: 3}[said]
        torch.rand(numbers, generator=twin, dtype=torch.float64)
        assert torch.equal(stream.get_state(), twin.get_state())
