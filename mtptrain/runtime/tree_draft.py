"""Grows token trees: with an autoregressive head a level a step, for all nodes that go on; with one whose places
do not depend on each other all at once, from the laws of the places.

A node's row attends the true rows, the rows of its ancestors and itself; it stands where a chain's row of the
same depth would, so what the head was trained for is what it is asked. The rows lie behind the true ones in the
draft's pages and are overwritten by the next true rows. Children are the head's best tokens, hence certain, and
verification needs no law of the draft; those of a static tree may be drawn from it instead. It gives up drawn
children of other trees: which of their nodes are kept depends on what was drawn.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtptrain.drafts.base import Draft, Proposal, TrueRows
from mtptrain.layers.product import product
from mtptrain.runtime.drawing import Drawing
from mtptrain.runtime.tree import ROOT, Tree, TreeShape, best_first, best_nodes, static_nodes


class TreeRows:
    """The rows of a step's trees that the head has run, equally many of each of B sequences."""

    def __init__(self, draft: Draft, rows: TrueRows) -> None:
        self.draft, self.pages = draft, rows.pages
        ends = [a + n for a, n in zip(rows.first_rows, rows.lens, strict=True)]
        self.first = torch.tensor(ends) + draft.start_rows
        self.seen = torch.zeros(len(self.first), 0, 0, dtype=torch.bool)  # [B, rows, rows]

    def run(self, ids: Tensor, states: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Runs k nodes of each sequence: their tokens [B, k], the states [B, k, H] that proposed them, and the
        rows [B, k] of their parents, ROOT below the true rows. Returns their states and rows."""
        (batch, new), old = ids.shape, self.seen.shape[1]
        above = F.pad(self.seen, (0, 0, 0, 1))  # ROOT points to a last row that sees nothing
        above = above.gather(1, (parents % (old + 1))[..., None].expand(-1, -1, old))
        mine = torch.cat([above, torch.eye(new, dtype=torch.bool).expand(batch, -1, -1)], -1)
        self.seen = torch.cat([F.pad(self.seen, (0, new)), mine], 1)
        positions = self.first[:, None] + mine.sum(-1) - 1
        first = (self.first + old).tolist()
        ctx = self.pages.context(first, [new] * batch, list(mine))
        on = states.device
        flat = ids.flatten().to(on), states.flatten(0, 1), positions.flatten().to(on), ctx
        out = self.draft.step(*flat).view(states.shape)
        return out, torch.arange(old, old + new).expand(batch, -1)


@torch.inference_mode()
def propose_tree(
    draft: Draft, rows: TrueRows, shape: TreeShape, depth: int, drawing: Drawing | None = None
) -> Proposal:
    """A tree for each sequence, at most `depth` deep; refills the draft's pages as `propose` does. With a `drawing`
    the children of a static tree are drawn by it."""
    laws = None
    if shape.kind == "static":
        trees, laws = _static(draft, rows, depth, drawing)
    else:
        grow = _dynamic if shape.kind == "dynamic" else _best_first
        trees = grow(draft, rows, shape, depth)
    parents = tuple(t.parents for t in trees)
    return Proposal(tuple(t.token_ids for t in trees), laws, draft.vocab, parents)


def _logits(draft: Draft, states: Tensor) -> Tensor:
    return product(draft.scored(states), draft.head_rows())


def _best(draft: Draft, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best tokens of each row [B, F, Vd]: log-probabilities and target ids, [B, F, k] on the host."""
    logits = logits.float()
    best = logits.topk(k, -1)
    log_probs = (best.values - logits.logsumexp(-1, keepdim=True)).clamp(max=0).cpu()
    return log_probs, _target_ids(draft, best.indices)


def _target_ids(draft: Draft, index: Tensor) -> Tensor:
    ids = index.cpu()
    return ids if draft.vocab is None else draft.vocab.cpu()[ids]


def _take(states: Tensor, places: Tensor) -> Tensor:
    """states [B, F, H] at `places` [B, k]."""
    at = places[..., None].expand(-1, -1, states.shape[-1]).to(states.device)
    return states.gather(1, at)


def _dynamic(draft: Draft, rows: TrueRows, shape: TreeShape, depth: int) -> list[Tree]:
    """EAGLE-2: at each level the k best nodes by the probability of their path go on, each with its k best
    children; of all that were looked at, the best become the tree."""
    k, batch = min(shape.top_k, len(draft.head_rows())), len(rows.lens)
    run, states = TreeRows(draft, rows), draft.start(rows)[:, None]
    scores, node = torch.zeros(batch, 1), torch.full((batch, 1), ROOT)
    row, count = node, 0
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # per level: ids, parents, scores [B, F * k]
    for level in range(depth):
        log_probs, ids = _best(draft, _logits(draft, states), k)
        ids, score = ids.flatten(1), (scores[..., None] + log_probs).flatten(1)
        found.append((ids, node.repeat_interleave(k, 1), score))
        if level + 1 == depth:
            break
        pick = score.sort(dim=1, descending=True, stable=True).indices[:, :k]
        above = pick // k
        states, row = run.run(ids.gather(1, pick), _take(states, above), row.gather(1, above))
        scores, node = score.gather(1, pick), count + pick
        count += score.shape[1]
    ids, parents, scores = (torch.cat(x, 1).tolist() for x in zip(*found, strict=True))
    candidates = zip(ids, parents, scores, strict=True)
    return [best_nodes(*of_one, shape.nodes) for of_one in candidates]


def _best_first(draft: Draft, rows: TrueRows, shape: TreeShape, depth: int) -> list[Tree]:
    """DDTree: the best paths through the draft's places; no path of n nodes needs a rank beyond n."""
    logits = draft.place_logits(rows, depth)
    log_probs, ids = _best(draft, logits, min(shape.nodes, logits.shape[-1]))
    places = zip(ids.tolist(), log_probs.tolist(), strict=True)
    return [best_first(*of_one, shape.nodes) for of_one in places]


def _static(
    draft: Draft, rows: TrueRows, depth: int, drawing: Drawing | None
) -> tuple[list[Tree], Tensor | None]:
    """EAGLE-1: the same ranks at every step; only nodes with children go on. Of drawn children the rank is their
    place among those drawn, and the laws [B, nodes with children, Vd] are those they come from."""
    parents, ranks = static_nodes(depth, len(draft.head_rows()))
    run, states = TreeRows(draft, rows), draft.start(rows)[:, None]
    batch = len(rows.lens)
    tokens = torch.zeros(batch, len(parents), dtype=torch.long)
    row_of = torch.full((batch, len(parents) + 1), ROOT)  # the last place is the root's
    holders, laws = [ROOT], list[Tensor]()  # the nodes that `states` belong to
    while holders:
        level = [i for i, p in enumerate(parents) if p in holders]
        above = torch.tensor([holders.index(parents[i]) for i in level])
        logits, most = _logits(draft, states), max(ranks[i] for i in level) + 1
        if drawing is None:
            _, ids = _best(draft, logits, most)
        else:
            index, law = drawing.distinct(logits, most)
            ids = _target_ids(draft, index)
            laws.append(law)
        tokens[:, level] = ids[:, above, [ranks[i] for i in level]]
        holders = [i for i in level if i in parents]
        if holders:
            at = torch.tensor([above[level.index(i)] for i in holders]).expand(batch, -1)
            behind = row_of[:, [parents[i] for i in holders]]
            states, rows_now = run.run(tokens[:, holders], _take(states, at), behind)
            row_of[:, holders] = rows_now
    trees = [Tree(tuple(x), parents) for x in tokens.tolist()]
    return trees, torch.cat(laws, 1) if laws else None
