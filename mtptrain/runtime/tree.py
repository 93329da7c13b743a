"""Token trees: several guesses at each place, verified in one pass of the target.

A tree hangs below the newest true token, its root; a node's parent stands before it. Three shapes. Static:
children by rank, the 25 nodes of EAGLE-1 (arXiv 2401.15077). Dynamic: the best nodes of all that a head has
scored, by the probability of their whole path (EAGLE-2, arXiv 2406.16858); a parent scores no lower than its
child, and at equal scores the parent is taken first, so the choice hangs together. Best-first: the same choice
where the laws of the places do not depend on each other, as those of parallel heads do not; a heap finds it
without scoring what is not taken. It gives up trees that several requests share.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mtptrain.drafts.base import DraftConfig
from mtptrain.types import SamplingParams, UserError

ROOT = -1

STATIC_RANKS: tuple[
    tuple[int, ...], ...
] = (  # EAGLE-1's tree: the ranks of a node and of its ancestors, from the root on
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


@dataclass(frozen=True)
class TreeShape:
    """Which trees are proposed; how deep they are is `num_draft_tokens`, so that AL <= 1 + D holds."""

    kind: Literal["static", "dynamic", "best_first"] | None = None  # None: a chain
    nodes: int = 59  # of a tree that is not static; its root, the newest token, makes one row more
    top_k: int = 10  # of a dynamic tree: nodes that go on at a level, and best children of each
    drawn: bool = False  # of a static tree above T=0: children drawn, not the best; see `verify`

    def __post_init__(self) -> None:
        if self.kind not in (None, "static", "dynamic", "best_first"):
            raise UserError(
                f"tree.kind={self.kind} is unknown; use static, dynamic, best_first or null (a chain)"
            )
        if self.drawn and self.kind != "static":
            raise UserError(
                "tree.drawn=true needs tree.kind=static: which nodes other trees have depends on their tokens"
            )
        if self.nodes < 1 or self.top_k < 1:
            raise UserError(
                f"tree.nodes={self.nodes} and tree.top_k={self.top_k} must both be at least 1"
            )

    def require(self, draft: DraftConfig) -> None:
        """Raises UserError where this draft cannot propose such trees."""
        grown = ("static", "dynamic") if draft.grows_trees else ()
        kinds = (*grown, "best_first") if draft.independent_places else grown
        if self.kind is not None and self.kind not in kinds:
            raise UserError(
                f"tree.kind={self.kind} does not fit this draft, which proposes "
                f"{'other trees' if kinds else 'chains'}; use tree.kind={' or '.join((*kinds, 'null'))}"
            )

    def require_verification(self, params: SamplingParams) -> None:
        """Raises UserError where these trees cannot be verified as asked."""
        if self.kind is not None and params.block_verify:
            raise UserError(
                f"block_verify=true is for chains; use tree.kind=null, or block_verify=false with tree.kind={self.kind}"
            )

    @property
    def name(self) -> str | None:
        """As a report says it."""
        match self.kind:
            case "dynamic":
                return f"dynamic, {self.nodes} nodes, top {self.top_k}"
            case "best_first":
                return f"best_first, {self.nodes} nodes"
            case "static" if self.drawn:
                return "static, drawn"
        return self.kind

    def most_rows(self, depth: int) -> int:
        """Rows behind the true ones that draft and target need at most for a proposal of this depth."""
        if self.kind == "dynamic":
            return max(self.nodes, self.top_k * (depth - 1))
        if self.kind == "best_first":
            return self.nodes
        return depth if self.kind is None else len(STATIC_RANKS)


@dataclass(frozen=True)
class Tree:
    """Proposed tokens and, for each, the index of its parent, which is lower; ROOT for children of the root.

    Siblings differ in their tokens.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"{len(self.token_ids)} tokens have {len(self.parents)} parents")
        if not all(ROOT <= p < i for i, p in enumerate(self.parents)):
            raise ValueError(f"a parent must stand before its children: {self.parents}")
        if len(set(zip(self.parents, self.token_ids, strict=True))) < len(self.parents):
            raise ValueError("two children of one node propose the same token")

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Edges from the root, per node; the root's children have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> dict[int, dict[int, int]]:
        """Of each node that has any, its children in order: token -> node."""
        found: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            found.setdefault(parent, {})[token] = node
        return found

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child down to this one; empty for the root."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def mask(self) -> Tensor:
        """[n + 1, n + 1] bool: which rows, the root's first, each row sees: its ancestors and itself."""
        above = torch.tensor([0, *(p + 1 for p in self.parents)])  # the root stays where it is
        mask, row = torch.eye(len(above), dtype=torch.bool), torch.arange(len(above))
        at = above
        for _ in range(max(self.depths, default=0)):
            mask[row, at] = True
            at = above[at]
        return mask


def chain(token_ids: Sequence[int]) -> Tree:
    """The tree with one child a node."""
    return Tree(tuple(token_ids), tuple(range(ROOT, len(token_ids) - 1)))


def static_nodes(depth: int, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(parents, own ranks) of the static tree's nodes, by depth; cut below `depth` and from rank `ranks` on."""
    kept = [path for path in STATIC_RANKS if len(path) <= depth and max(path) < ranks]
    place = {path: i for i, path in enumerate(kept)}
    return tuple(place.get(path[:-1], ROOT) for path in kept), tuple(path[-1] for path in kept)


def best_nodes(
    token_ids: Sequence[int], parents: Sequence[int], scores: Sequence[float], nodes: int
) -> Tree:
    """EAGLE-2's second choice: of all scored candidates, parents first, the `nodes` best as a tree.

    `scores` are log-probabilities of whole paths: none is above its parent's.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])  # stable: the parent first
    kept = sorted(order[:nodes])
    place = {ROOT: ROOT} | {old: new for new, old in enumerate(kept)}
    return Tree(tuple(token_ids[i] for i in kept), tuple(place[parents[i]] for i in kept))


def best_first(
    token_ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], nodes: int
) -> Tree:
    """The `nodes` best paths where place d says token_ids[d][r] with log-probability log_probs[d][r], r from
    the best on, whatever was said before it (DDTree). Stops where there are no more paths."""
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if token_ids and token_ids[0]:
        heap.append((-log_probs[0][0], (0,), ROOT))
    tokens: list[int] = []
    parents: list[int] = []
    while heap and len(tokens) < nodes:
        cost, ranks, parent = heapq.heappop(heap)
        node, depth, rank = len(tokens), len(ranks), ranks[-1]
        tokens.append(token_ids[depth - 1][rank])
        parents.append(parent)
        here = log_probs[depth - 1]
        if rank + 1 < len(here):
            sibling = (*ranks[:-1], rank + 1)
            heapq.heappush(heap, (cost + here[rank] - here[rank + 1], sibling, parent))
        if depth < len(token_ids) and token_ids[depth]:
            heapq.heappush(heap, (cost - log_probs[depth][0], (*ranks, 0), node))
    return Tree(tuple(tokens), tuple(parents))
