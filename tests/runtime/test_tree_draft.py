"""Trees grown level by level are those that chains, run path by path, would give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base import Draft, Drawn, HeadConfig, TrueRows
from mtptrain.drafts.draft_model import DraftModelConfig
from mtptrain.drafts.medusa import MedusaConfig
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.runtime.drawing import Drawing
from mtptrain.runtime.model_runner import ModelRunner
from mtptrain.runtime.sampler import generator, probabilities
from mtptrain.runtime.scheduler import EngineLimits, Scheduler
from mtptrain.runtime.tree import STATIC_RANKS, Tree, TreeShape
from mtptrain.runtime.tree_draft import propose_tree
from mtptrain.targets.base import Target
from mtptrain.types import Completion, Request, SamplingParams

Path = tuple[int, ...]
CASES: dict[str, HeadConfig] = {
    "trained": MTPConfig(),
    "reduced vocabulary": MTPConfig(draft_vocab=tuple(range(0, 512, 2))),
    "two taps": MTPConfig(taps=("layer.1", "final")),
    "draft model": DraftModelConfig(num_layers=2),
}
PLACES: dict[str, HeadConfig] = {
    "heads": MedusaConfig(num_heads=3),
    "heads of a reduced vocabulary": MedusaConfig(num_heads=3, draft_vocab=tuple(range(0, 512, 2))),
}


class Desk:
    """Several prompts whose true rows are known, laid out anew for each proposal."""

    def __init__(
        self,
        draft: Draft,
        target: Target,
        backend: AttentionBackend,
        documents: list[tuple[Tensor, Tensor]],
    ) -> None:
        self.draft, self.target, self.backend, self.documents = draft, target, backend, documents

    def rows(self) -> TrueRows:
        limits = EngineLimits(page_size=4, num_pages=256, num_draft_tokens=4)
        runner = ModelRunner(self.target, self.draft, self.backend, limits, self.draft.taps)
        for pool in (*runner.pool.keys, *runner.pool.values):
            pool.fill_(9.0)  # what lies in the pages must not matter
        asked = [
            Request(str(i), "all", tuple(x.tolist())) for i, (x, _) in enumerate(self.documents)
        ]
        scheduler = Scheduler(asked, SamplingParams(), limits, False)
        scheduler.admit()
        for sequence, (_, features) in zip(scheduler.running, self.documents, strict=True):
            scheduler.grow(sequence, sequence.num_prompt + 60)
            sequence.pending = [features]
        return runner.true_rows(scheduler.running, [len(f) for _, f in self.documents])

    def laws(self, paths: list[Path]) -> list[Tensor]:
        """Log-probabilities over the target's ids behind a path of each prompt, drafted as a chain."""
        steps: list[Tensor] = []
        vocab = self.draft.vocab

        def draw(logits: Tensor) -> Drawn:
            steps.append(logits)
            given = [p[len(steps) - 1] if len(steps) <= len(p) else 0 for p in paths]
            token = torch.tensor(given)
            return Drawn(token if vocab is None else torch.searchsorted(vocab, token), None)

        self.draft.propose(self.rows(), len(paths[0]) + 1, draw)
        law = steps[-1].log_softmax(-1)
        whole = law.new_full((len(paths), 512), float("-inf"))
        return list(whole.index_copy_(1, torch.arange(512) if vocab is None else vocab, law))


@pytest.fixture
def desk(
    tiny_target: Target,
    backend: AttentionBackend,
    fit_head: Callable[..., Draft],
    answers: list[Completion],
    document: Callable[..., tuple[Tensor, ...]],
) -> Callable[[str], Desk]:
    def make(name: str) -> Desk:
        draft = fit_head((CASES | PLACES)[name])
        known = []
        for completion, rows in zip(answers[:2], (31, 38), strict=True):
            ids, features, *_ = document(completion, draft.taps)
            known.append((ids[: rows + 1], features[:rows]))
        return Desk(draft, tiny_target, backend, known)

    return make


def _paths(token_ids: tuple[int, ...], parents: tuple[int, ...]) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(token_ids, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def _slow_dynamic(desk: Desk, which: int, shape: TreeShape, depth: int) -> dict[Path, float]:
    """EAGLE-2 with dictionaries: every path drafted as a chain of its own."""
    scores: dict[Path, float] = {(): 0.0}
    level, seen = [()], list[Path]()
    for _ in range(depth):
        news = []
        for path in level:
            law = desk.laws([path] * len(desk.documents))[which]
            for value, token in zip(*(x.tolist() for x in law.topk(shape.top_k)), strict=True):
                scores[(*path, token)] = scores[path] + value
                news.append((*path, token))
        seen += news
        level = sorted(news, key=lambda p: -scores[p])[: shape.top_k]
    best = sorted(seen, key=lambda p: -scores[p])[: shape.nodes]
    return {path: scores[path] for path in best}


@pytest.mark.parametrize("name", CASES)
def test_the_dynamic_tree_is_that_of_chains_run_one_by_one(
    desk: Callable[[str], Desk], name: str
) -> None:
    """The nodes of both prompts are the best of all that chains have scored: so every row saw the true rows
    and its own ancestors, at the place of its depth, and fed on its parent's state."""
    shape, at = TreeShape("dynamic", 14, 3), desk(name)
    proposal = propose_tree(at.draft, at.rows(), shape, 4)
    assert proposal.parents is not None and proposal.probs is None
    for which, (tokens, parents) in enumerate(
        zip(proposal.token_ids, proposal.parents, strict=True)
    ):
        expected = _slow_dynamic(at, which, shape, 4)
        paths = _paths(tokens, parents)
        assert len(paths) == 14 and set(paths) == set(expected)
        assert max(map(len, paths)) > 2
        assert [len(p) for p in paths] == sorted(len(p) for p in paths)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_the_static_tree_holds_the_ranks_of_chains_run_one_by_one(
    desk: Callable[[str], Desk], depth: int
) -> None:
    """Each node is the asked rank of its parent's law, as a chain along its path has it."""
    at = desk("trained")
    proposal = propose_tree(at.draft, at.rows(), TreeShape("static"), depth)
    assert proposal.parents is not None
    ranks = [r for r in STATIC_RANKS if len(r) <= depth]
    found = [_paths(*x) for x in zip(proposal.token_ids, proposal.parents, strict=True)]
    assert [len(p) for p in found] == [len(ranks)] * 2
    order = {path: rank for path, rank in zip(ranks, range(len(ranks)), strict=True)}
    for rank in ranks:
        mine = [paths[order[rank]] for paths in found]
        laws = at.laws([path[:-1] for path in mine])
        for path, law in zip(mine, laws, strict=True):
            assert path[-1] == int(law.topk(4).indices[rank[-1]])


@pytest.mark.parametrize("name", PLACES)
def test_the_best_first_tree_is_the_best_of_all_paths(
    desk: Callable[[str], Desk], name: str
) -> None:
    """The nodes of both prompts are the best of every path of up to three tokens, each place scored by what a
    chain would draw from, whatever was drafted before; fewer places are as deep as was asked."""
    at, nodes = desk(name), 30
    for depth in (3, 2):
        proposal = propose_tree(at.draft, at.rows(), TreeShape("best_first", nodes), depth)
        assert proposal.parents is not None and proposal.probs is None
        places = [at.laws([(0,) * d] * len(at.documents)) for d in range(depth)]
        for which, (tokens, parents) in enumerate(
            zip(proposal.token_ids, proposal.parents, strict=True)
        ):
            scores = {(): 0.0}
            level = [()]
            for place in places:
                best = place[which].topk(nodes)
                level = [(*path, t) for path in level for t in best.indices.tolist()]
                law = place[which]
                scores |= {path: scores[path[:-1]] + float(law[path[-1]]) for path in level}
            del scores[()]
            expected = sorted(scores, key=lambda path: -scores[path])[:nodes]
            paths = _paths(tokens, parents)
            assert len(paths) == nodes and set(paths) == set(expected)
            assert 1 < max(map(len, paths)) <= depth


@pytest.mark.parametrize("name", ["trained", "reduced vocabulary", "draft model"])
def test_drawn_children_come_with_the_law_they_were_drawn_from(
    desk: Callable[[str], Desk], name: str
) -> None:
    """Of a static tree above T=0: the law of every node with children is that of a chain along its path, in the
    order of the tree's own children; siblings differ, and each prompt draws from its own stream."""
    at, params = desk(name), SamplingParams(0.7, top_k=20)
    streams = [generator(0, place) for place in range(len(at.documents))]
    drawing = Drawing(params, streams)
    proposal = propose_tree(at.draft, at.rows(), TreeShape("static", drawn=True), 3, drawing)
    assert proposal.parents is not None and proposal.probs is not None
    trees = [Tree(*x) for x in zip(proposal.token_ids, proposal.parents, strict=True)]
    assert trees[0].parents == trees[1].parents
    holders = list(trees[0].children)
    assert [len(x) for x in proposal.probs] == [len(holders)] * 2
    for k, node in enumerate(holders):
        mine = [tuple(t.token_ids[x] for x in t.path(node)) for t in trees]
        for which, law in enumerate(at.laws(mine)):
            q = proposal.probs[which][k]
            if proposal.vocab is not None:
                q = torch.zeros(512).index_copy(0, proposal.vocab, q)
            torch.testing.assert_close(q, probabilities(law, params), atol=1e-4, rtol=1e-3)
            assert all(float(q[t]) > 0 for t in trees[which].children[node])


def test_a_vocabulary_of_three_bounds_the_tree(
    tiny_target: Target,
    backend: AttentionBackend,
    answers: list[Completion],
    document: Callable[..., tuple[Tensor, ...]],
) -> None:
    """A head that can say three tokens has three children at most, whatever is asked."""
    draft = MTPConfig(draft_vocab=(3, 40, 41)).build(tiny_target)
    ids, features, *_ = document(answers[0], draft.taps)
    at = Desk(draft, tiny_target, backend, [(ids[:21], features[:20])])
    for shape, nodes in ((TreeShape("dynamic", 500, 10), 3 + 9), (TreeShape("static"), 3 + 7)):
        (tokens,) = propose_tree(draft, at.rows(), shape, 2).token_ids
        assert len(tokens) == nodes and set(tokens) <= {3, 40, 41}
