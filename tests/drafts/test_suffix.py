"""Suffix decoding: the trees count what a search over all texts counts, at a cost that does not grow."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch

import mtptrain.drafts.suffix as module
from mtptrain.drafts.base import TrueRows
from mtptrain.drafts.suffix import Node, OwnText, PastOutputs, Suffix, SuffixConfig, SuffixTree
from mtptrain.types import Completion, Request, UserError

CONFIGS = [
    SuffixConfig(),
    SuffixConfig(max_depth=3, max_outputs=2, spec_factor=2.5, min_prob=0.0),
    SuffixConfig(max_depth=5, max_outputs=3, spec_factor=0.6, min_prob=0.3),
    SuffixConfig(max_depth=1, max_outputs=1, spec_factor=4.0, min_prob=0.6),
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"depth {c.max_depth}")


# ---- the oracle: a search over all texts, by the definition -----------------------------------------------


def _followers(texts: Sequence[list[int]], context: list[int]) -> list[int]:
    """What followed the context, place after place."""
    n = len(context)
    return [t[i] for t in texts for i in range(n, len(t)) if t[i - n : i] == context]


def _continued(
    texts: Sequence[list[int]], context: list[int], most: int, config: SuffixConfig
) -> tuple[tuple[int, ...], float]:
    chain, score, prob = [], 0.0, 1.0
    while len(chain) < most:
        seen = _followers(texts, [*context, *chain][-config.max_depth :])
        if not seen:
            break
        counts = Counter(seen)
        newest = {token: i for i, token in enumerate(seen)}
        token = max(counts, key=lambda x: (counts[x], newest[x]))
        prob *= counts[token] / len(seen)
        if prob < config.min_prob:
            break
        chain.append(token)
        score += prob
    return tuple(chain), score


def _searched(
    texts: Sequence[list[int]], newest: list[int], tokens: int, config: SuffixConfig
) -> tuple[tuple[int, ...], float]:
    """Every suffix proposes; the highest score wins, of equals the longest suffix."""
    best = ((), 0.0)
    for p in range(1, min(config.max_depth, len(newest)) + 1):
        most = min(tokens, int(p * config.spec_factor))
        chain, score = _continued(texts, newest[-p:], most, config)
        if chain and score >= best[1]:
            best = (chain, score)
    return best


def _text(stream: random.Random, length: int) -> list[int]:
    """Tokens with many repeats: of two to five kinds, and pieces that are said again."""
    kinds, text = stream.randrange(2, 6), list[int]()
    while len(text) < length:
        if len(text) > 4 and stream.random() < 0.3:
            start = stream.randrange(len(text) - 2)
            text += text[start : start + stream.randrange(2, 12)]
        else:
            text.append(stream.randrange(kinds))
    return text[:length]


# ---- the trees --------------------------------------------------------------------------------------------


@every_config
@pytest.mark.parametrize("seed", range(8))
def test_a_growing_text_proposes_what_a_search_finds(config: SuffixConfig, seed: int) -> None:
    """Extended by a few tokens at a time, the request's own tree gives the oracle's chain and score."""
    stream = random.Random(seed)
    text, own, end, found = _text(stream, 90), OwnText(config), 1, 0
    while end < len(text):
        own.extend(text[:end])
        chain, score = own.tree.propose(text[:end], 6, config)
        expected = _searched([text[:end]], text[:end], 6, config)
        assert (chain, score) == (expected[0], pytest.approx(expected[1]))
        found += bool(chain)
        end += stream.randrange(1, 4)
    assert found > 5


@every_config
@pytest.mark.parametrize("seed", range(8))
def test_past_outputs_propose_what_a_search_over_the_kept_ones_finds(
    config: SuffixConfig, seed: int
) -> None:
    """Outputs come and the oldest go: chain and score are those of the texts that are still kept."""
    config = replace(config, max_outputs=min(config.max_outputs, 4))
    stream = random.Random(seed)
    past, texts = PastOutputs(config), list[list[int]]()
    common = _text(stream, 40)
    for _ in range(14):
        start = stream.randrange(30)
        texts.append((common[start:] + _text(stream, 30))[: stream.randrange(0, 40)])
        past.add(tuple(texts[-1]))
        kept = texts[-config.max_outputs :]
        for newest in (common[: stream.randrange(1, 40)], texts[-1], _text(stream, 12)):
            chain, score = past.tree.propose(newest, 6, config)
            expected = _searched(kept, newest, 6, config)
            assert (chain, score) == (expected[0], pytest.approx(expected[1]))


def _nodes(tree: SuffixTree) -> list[Node]:
    nodes = [tree.root]
    for node in nodes:
        nodes += node.children.values()
    return nodes[1:]


@every_config
def test_what_is_let_go_leaves_nothing_behind(config: SuffixConfig) -> None:
    """After any past, the tree is node for node one that has only seen the kept outputs, and no node holds
    on to a text that was let go; with all of them gone it is empty."""
    stream = random.Random(3)
    past = PastOutputs(config := replace(config, max_outputs=3))
    for _ in range(12):
        past.add(tuple(_text(stream, stream.randrange(50))))
        anew = PastOutputs(config)
        for text in past.texts:
            anew.add(tuple(text))
        assert _shape(past.tree.root) == _shape(anew.tree.root)
        assert all(any(n.text is t for t in past.texts) for n in _nodes(past.tree))
    for _ in range(3):
        past.add(())
    assert not past.tree.root.children


def _shape(node: Node) -> object:
    kept = (node.depth, node.count, node.best, tuple(node.followers.items()))
    return kept, {token: _shape(child) for token, child in node.children.items()}


@every_config
def test_memory_is_two_nodes_a_token_at_most(config: SuffixConfig) -> None:
    """However the text repeats itself: one token for ever, two in turn, copies of a piece, or none twice."""
    piece = _text(random.Random(1), 60)
    for text in ([7] * 300, [1, 2] * 150, piece * 5, list(range(300))):
        own = OwnText(config)
        own.extend(text)
        assert 0 < len(_nodes(own.tree)) <= 2 * len(text)


# ---- cost -------------------------------------------------------------------------------------------------


def _steps(work: Callable[[], Any]) -> int:
    """Lines of suffix.py that run: what a call costs, whatever machine it is on."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["random", "one token", "period", "copies"])
def test_a_token_costs_the_same_late_as_early(kind: str) -> None:
    """The dearest of forty tokens, each appended and proposed behind, costs no more after 8,000 tokens than
    a bound that knows depth and draft length only, and on average hardly more than after 1,000 (matches grow
    longer with the logarithm)."""
    stream, config = random.Random(0), SuffixConfig(max_depth=12)
    piece = [stream.randrange(50) for _ in range(400)]
    texts = {
        "random": [stream.randrange(3) for _ in range(8100)],
        "one token": [5] * 8100,
        "period": [1, 2, 3, 4, 5, 6, 7] * 1160,
        "copies": piece * 21,
    }
    text, own, costs = texts[kind], OwnText(config), {}
    for start in (1000, 8000):
        own.extend(text[:start])
        costs[start] = []
        for end in range(start + 1, start + 41):
            whole = text[:end]
            work = [lambda w=whole: own.extend(w), lambda w=whole: own.tree.propose(w, 4, config)]
            costs[start].append(sum(_steps(x) for x in work))
    assert max(costs[8000]) < 12 * 30 + 12 * 4 * 12 * 4
    assert sum(costs[8000]) < 1.6 * sum(costs[1000])


# ---- the draft --------------------------------------------------------------------------------------------


def _rows(ids: Sequence[list[int]], memories: Sequence[dict[str, Any]], common: dict) -> TrueRows:
    n = len(ids)
    none = torch.zeros(n, 0)
    return TrueRows(tuple(ids), (0,) * n, (1,) * n, none, None, tuple(memories), common)  # pyright: ignore


def _ended(*output: int) -> Completion:
    return Completion(Request("r", "all", (9, 8)), output, (), len(output), "length")


def test_own_text_and_past_outputs_are_both_asked() -> None:
    """The higher score wins, of equals the request's own text; what is in neither proposes nothing."""
    draft, common, memories = Suffix(SuffixConfig()), {}, ({}, {}, {})
    for _ in range(2):
        draft.finish(_ended(1, 2, 3, 4, 5), common)
    draft.finish(_ended(1, 2, 7), common)
    ids = ([6, 1, 2], [1, 2, 6, 0, 1, 2], [11, 12, 13])
    proposal = draft.propose(_rows(ids, memories, common), 4, None)  # pyright: ignore
    assert proposal.token_ids == ((3, 4), (6, 0), ()) and proposal.probs is None
    assert proposal.scores == (pytest.approx(4 / 3), 2.0, 0.0)


def test_what_one_engine_learns_no_other_knows() -> None:
    """Past outputs lie with the engine, the text of a request with the request, nothing with the draft."""
    draft, common = Suffix(SuffixConfig()), {}
    draft.finish(_ended(1, 2, 3, 4), common)
    for held, chain in ((common, (3, 4)), ({}, ())):
        proposal = draft.propose(_rows([[1, 2]], [{}], held), 4, None)  # pyright: ignore
        assert proposal.token_ids == (chain,)


def test_no_past_outputs_are_kept_where_none_are_asked_for() -> None:
    """max_outputs=0 leaves the request's own text alone: proposals do not depend on other requests."""
    draft, common = Suffix(SuffixConfig(max_outputs=0)), {}
    draft.finish(_ended(1, 2, 3, 4), common)
    proposal = draft.propose(_rows([[1, 2]], [{}], common), 4, None)  # pyright: ignore
    assert proposal.token_ids == ((),)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_depth": 0},
        {"max_outputs": -1},
        {"spec_factor": 0.0},
        {"spec_factor": float("nan")},
        {"min_prob": 1.5},
    ],
    ids=str,
)
def test_sizes_that_find_nothing_are_refused(wrong: dict[str, Any]) -> None:
    """The message names the key."""
    with pytest.raises(UserError, match=f"draft.{next(iter(wrong))}={next(iter(wrong.values()))}"):
        SuffixConfig(**wrong)
