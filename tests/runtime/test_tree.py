"""Token trees: shapes, masks, and choices held against slow obvious ones."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from mtptrain.runtime.tree import (
    ROOT,
    Tree,
    TreeShape,
    best_first,
    best_nodes,
    chain,
    static_nodes,
)
from mtptrain.types import UserError


def _random_tree(seed: int, nodes: int) -> Tree:
    rng = random.Random(seed)
    parents = tuple(rng.randrange(ROOT, i) for i in range(nodes))
    return Tree(tuple(range(nodes)), parents)


def _path(tree: Tree, node: int) -> list[int]:
    """The nodes from the root's child down to this one."""
    path = []
    while node != ROOT:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


# ---- the tree itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [0, 1, 2, 7, 25, 60])
def test_mask_depth_and_children_are_those_of_the_paths(nodes: int) -> None:
    """Walking up from every node, one by one, gives its depth, what its row sees and whose child it is."""
    tree = _random_tree(nodes, nodes)
    mask = tree.mask()
    assert mask.shape == (nodes + 1, nodes + 1) and mask.dtype == torch.bool
    assert mask[0].tolist() == [True] + [False] * nodes
    for node in range(nodes):
        path = _path(tree, node)
        assert tree.path(node) == path
        assert tree.depths[node] == len(path)
        assert mask[node + 1].nonzero().flatten().tolist() == [0, *(x + 1 for x in path)]
        assert tree.children[tree.parents[node]][tree.token_ids[node]] == node
    assert sum(len(x) for x in tree.children.values()) == nodes


def test_a_chain_is_a_tree_with_a_causal_mask() -> None:
    tree = Tree((5, 5, 5), (ROOT, 0, 1))
    assert chain((5, 5, 5)) == tree and chain(()) == Tree((), ())
    assert torch.equal(tree.mask(), torch.ones(4, 4).tril().bool())
    assert tree.depths == (1, 2, 3)


@pytest.mark.parametrize(
    ("tokens", "parents", "reason"),
    [
        ((1, 2), (ROOT,), "2 tokens have 1 parents"),
        ((1, 2), (1, ROOT), "a parent must stand before"),
        ((1,), (0,), "a parent must stand before"),
        ((1,), (-2,), "a parent must stand before"),
        ((1, 3, 1), (ROOT, 0, ROOT), "the same token"),
    ],
)
def test_what_is_no_tree_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Tree(tokens, parents)


# ---- static ----------------------------------------------------------------------------------------------


def test_the_static_tree_is_eagle_1s() -> None:
    """25 nodes, five deep: 4, 8, 8, 3 and 2 a level; the first path is the best token five times over."""
    parents, ranks = static_nodes(5, 512)
    tree = Tree(tuple(range(25)), parents)
    assert [tree.depths.count(d) for d in range(1, 6)] == [4, 8, 8, 3, 2]
    paths = [tuple(ranks[x] for x in _path(tree, node)) for node in range(25)]
    assert len(set(paths)) == 25 and (0,) * 5 in paths and (1, 0, 0) in paths
    assert all(path[:-1] in paths for path in paths if len(path) > 1)


@pytest.mark.parametrize(
    ("depth", "ranks", "nodes"), [(1, 9, 4), (2, 9, 12), (9, 9, 25), (5, 1, 5)]
)
def test_the_static_tree_is_cut_to_what_can_be_drafted(depth: int, ranks: int, nodes: int) -> None:
    """No node lies deeper than asked, none has a rank that a small vocabulary lacks, and none its parent."""
    parents, own = static_nodes(depth, ranks)
    assert len(Tree(tuple(range(len(own))), parents).parents) == nodes
    assert max(own) < ranks


# ---- dynamic ---------------------------------------------------------------------------------------------


def _scored(seed: int, depth: int, width: int, steps: tuple[float, ...]) -> list[tuple[int, ...]]:
    """All paths of `width` tokens a place, by level; with their scores in SCORES."""
    rng = random.Random(seed)
    SCORES.clear()
    SCORES[()] = 0.0
    paths = []
    for length in range(1, depth + 1):
        for path in itertools.product(range(width), repeat=length):
            SCORES[path] = SCORES[path[:-1]] + rng.choice(steps)
            paths.append(path)
    return paths


SCORES: dict[tuple[int, ...], float] = {}


def _paths(tree: Tree) -> set[tuple[int, ...]]:
    return {
        tuple(tree.token_ids[x] for x in _path(tree, node)) for node in range(len(tree.parents))
    }


@pytest.mark.parametrize("steps", [(-0.3, -0.7, -1.9), (0.0, -1.0), (0.0,)], ids=str)
@pytest.mark.parametrize("nodes", [1, 5, 17, 39, 100])
def test_the_best_nodes_are_a_tree_whatever_is_equal(nodes: int, steps: tuple[float, ...]) -> None:
    """Of all paths sorted by score, shorter ones first where equal, the first n; parents come along, also
    where a child scores as its parent does."""
    paths = _scored(nodes, 3, 3, steps)
    place = {(): ROOT} | {path: i for i, path in enumerate(paths)}
    tree = best_nodes(
        [path[-1] for path in paths],
        [place[path[:-1]] for path in paths],
        [SCORES[path] for path in paths],
        nodes,
    )
    expected = sorted(paths, key=lambda path: (-SCORES[path], len(path), path))[:nodes]
    assert _paths(tree) == set(expected)


# ---- best first ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 6, 20, 84, 500])
@pytest.mark.parametrize("seed", range(4))
def test_best_first_finds_the_best_paths_over_independent_places(seed: int, nodes: int) -> None:
    """The heap gives the n best of all paths of all lengths, as sorting every one of them does."""
    rng = random.Random(seed)
    widths = (4, 4, 4)
    tokens = [rng.sample(range(100), w) for w in widths]
    laws = [sorted((-rng.random() * 3 for _ in range(w)), reverse=True) for w in widths]
    tree = best_first(tokens, laws, nodes)
    every = [
        ranks for n in (1, 2, 3) for ranks in itertools.product(*(range(w) for w in widths[:n]))
    ]
    every.sort(key=lambda ranks: -sum(laws[d][r] for d, r in enumerate(ranks)))
    expected = {tuple(tokens[d][r] for d, r in enumerate(ranks)) for ranks in every[:nodes]}
    assert _paths(tree) == expected


def test_best_first_of_nothing_is_an_empty_tree() -> None:
    assert best_first([], [], 5) == Tree((), ())
    assert best_first([[7, 8]], [[-0.1, -2.0]], 9) == Tree((7, 8), (ROOT, ROOT))


# ---- settings --------------------------------------------------------------------------------------------


def test_a_shape_knows_how_many_rows_it_needs() -> None:
    """A chain one a token; a dynamic tree its nodes, or what the head has run, whichever is more."""
    assert TreeShape().most_rows(4) == 4
    assert TreeShape("static").most_rows(2) == 25
    assert TreeShape("dynamic", 59, 10).most_rows(6) == 59
    assert TreeShape("dynamic", 20, 10).most_rows(6) == 50
    assert TreeShape("best_first", 20, 10).most_rows(6) == 20


def test_a_shape_has_a_name_that_says_all_of_it() -> None:
    """As it stands in a report: what means nothing to its kind is left out."""
    assert TreeShape().name is None and TreeShape("static").name == "static"
    assert TreeShape("static", drawn=True).name == "static, drawn"
    assert TreeShape("dynamic", 9, 3).name == "dynamic, 9 nodes, top 3"
    assert TreeShape("best_first", 9).name == "best_first, 9 nodes"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "round"},
        {"kind": "dynamic", "nodes": 0},
        {"kind": "dynamic", "top_k": 0},
        {"kind": "dynamic", "drawn": True},
        {"drawn": True},
    ],
)
def test_an_impossible_shape_is_the_users_error(change: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"tree\."):
        TreeShape(**change)  # pyright: ignore
