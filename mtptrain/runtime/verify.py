"""Which drafted tokens hold: the greedy walk, and rejection sampling that leaves the target's law unchanged.

Greedy: accept while the drafted token is the target's best, then emit the target's best. Sampling
(Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): accept x with probability
min(1, p(x)/q(x)); at the first rejection emit from norm(max(0, p - q)); if all hold, emit from the next p.
q must be the distribution the token was drawn from; a certain token is q = 1 at that token. A node of a token
tree has several children: each is tried in turn with the law that those before it have left (SpecInfer, arXiv
2305.09781). Where they are certain, a node goes on with the mass of all its children; where they were drawn from
q without putting back, each round has the q that those before it have left as well.

As a block (Sun et al., arXiv 2403.10444): a token that the target likes better than the draft makes up for
one before it, so the longest prefix that holds is asked for, rather than the first token that does not. It
accepts no less on average, a few percent more in practice, and has to look at every row of the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtptrain.runtime.sampler import draw
from mtptrain.runtime.tree import ROOT, Tree

MIN_RESIDUAL = 1e-8  # below this mass p and q are the same distribution to rounding: emit from p
TINY = torch.finfo(torch.float32).tiny

Best = Callable[
    [Sequence[tuple[int, int]]], list[int]
]  # (proposal, row of it) -> what the target says


def verify_greedy(chains: Sequence[Sequence[int]], best: Best) -> list[tuple[int, int]]:
    """(accepted, next token) of each chain of D tokens, which has D + 1 rows.

    The target's best is asked for all chains at once, row by row, and only where a chain still holds: rows
    behind the first difference never meet the head.
    """
    accepted, emitted = [0] * len(chains), [0] * len(chains)
    holding = list(range(len(chains)))
    while holding:
        tokens = best([(i, accepted[i]) for i in holding])
        still = []
        for i, token in zip(holding, tokens, strict=True):
            emitted[i] = token
            if accepted[i] < len(chains[i]) and chains[i][accepted[i]] == token:
                accepted[i] += 1
                still.append(i)
        holding = still
    return list(zip(accepted, emitted, strict=True))


def verify_sampled(
    chain: Sequence[int],
    target_probs: Tensor,  # [D + 1, V]
    draft_probs: Tensor | None,  # [D, Vd]; None: every drafted token was certain
    vocab: Tensor | None,  # [Vd] target ids; None: the draft's vocabulary is the target's
    generator: torch.Generator,
) -> tuple[int, int]:
    """(accepted, next token) by lossless rejection sampling; draws one number per test and one for the token."""

    def uniform() -> float:
        return float(torch.rand(1, generator=generator, dtype=torch.float64))

    for i, token in enumerate(chain):
        p = target_probs[i]
        q = _over_target_vocabulary(draft_probs, i, token, vocab, p)
        if uniform() * float(q[token]) >= float(p[token]):
            residual = (p - q).clamp_(min=0)
            source = residual if float(residual.sum()) > MIN_RESIDUAL else p
            return i, _draw_one(source, uniform())
    return len(chain), _draw_one(target_probs[len(chain)], uniform())


def verify_block(
    chain: Sequence[int],
    target_probs: Tensor,  # [D + 1, V]
    draft_probs: Tensor | None,  # [D, Vd]; None: every drafted token was certain
    vocab: Tensor | None,  # [Vd] target ids; None: the draft's vocabulary is the target's
    generator: torch.Generator,
) -> tuple[int, int]:
    """(accepted, next token) by lossless block verification; draws one number per drafted token and one more.

    `weight` w_i is min(1, w_{i-1} p(x_i) / q(x_i)). The prefix of length i holds with probability
    r / (r + 1 - w_i), r the mass of the residual max(0, w_i p - q) behind it; the whole chain with w_D.
    """
    uniforms = torch.rand(len(chain) + 1, generator=generator, dtype=torch.float64).tolist()
    accepted, source, weight = 0, None, 1.0
    for i, token in enumerate(chain):
        p = target_probs[i]
        q = _over_target_vocabulary(draft_probs, i, token, vocab, p)
        residual = (weight * p - q).clamp_(min=0)
        mass = float(residual.sum())
        if i == 0 or uniforms[i - 1] * (mass + 1 - weight) < mass:
            accepted, source = i, residual if mass > MIN_RESIDUAL else p
        weight = min(1.0, weight * float(p[token]) / max(float(q[token]), TINY))
    if chain and uniforms[len(chain) - 1] >= weight:
        assert source is not None, "the empty prefix always holds"
        return accepted, _draw_one(source, uniforms[-1])
    return len(chain), _draw_one(target_probs[len(chain)], uniforms[-1])


def verify_trees(trees: Sequence[Tree], says: Best) -> list[tuple[list[int], int]]:
    """(accepted path, next token) of each tree of n nodes, which has n + 1 rows, the root's first.

    A walk from the root to the child whose token the target says, for as long as there is one; `says` is asked
    for all trees at once, level by level. Siblings differ, so that greedily it is the longest accepted path.
    """
    paths: list[list[int]] = [[] for _ in trees]
    emitted = [0] * len(trees)
    walking = list(range(len(trees)))
    while walking:
        at = [paths[i][-1] if paths[i] else ROOT for i in walking]
        tokens = says([(i, node + 1) for i, node in zip(walking, at, strict=True)])
        still = []
        for i, node, token in zip(walking, at, tokens, strict=True):
            emitted[i] = token
            child = trees[i].children.get(node, {}).get(token)
            if child is not None:
                paths[i].append(child)
                still.append(i)
        walking = still
    return list(zip(paths, emitted, strict=True))


def say_sampled(law: Tensor, children: Sequence[int], generator: torch.Generator) -> int:
    """A token of `law` [V], found by trying the distinct `children` first: child c is accepted with probability
    p(c), else p(c) becomes 0 and the rest is renormalised; draws one number per test and one for the token."""
    left = law.to("cpu", torch.float64, copy=True)
    for child in children:
        u = torch.rand(1, generator=generator, dtype=torch.float64)
        if bool(u * left.sum() < left[child]):
            return child
        left[child] = 0
    return _draw_one(left, float(torch.rand(1, generator=generator, dtype=torch.float64)))


def say_drawn(
    law: Tensor,  # [V]
    children: Sequence[int],  # distinct, in the order in which they were drawn
    draft_law: Tensor,  # [Vd] that the first was drawn from
    vocab: Tensor | None,  # [Vd] target ids; None: the draft's vocabulary is the target's
    generator: torch.Generator,
) -> int:
    """A token of `law`, found by trying `children` first, drawn from `draft_law` without putting back; draws as
    `say_sampled` does. A child behind all that have any probability counts as certain."""
    left, q = law.to("cpu", torch.float64, copy=True), torch.zeros(len(law), dtype=torch.float64)
    q[slice(None) if vocab is None else vocab.cpu()] = draft_law.to("cpu", torch.float64)
    for child in children:
        total = float(q.sum())
        now = q / total if total > 0 else torch.zeros_like(q).index_fill_(0, _at(child), 1)
        left = left / left.sum()
        u = torch.rand(1, generator=generator, dtype=torch.float64)
        if bool(u * now[child] < left[child]):
            return child
        residual = (left - now).clamp_(min=0)
        left = residual if float(residual.sum()) > MIN_RESIDUAL else left
        q[child] = 0
    return _draw_one(left, float(torch.rand(1, generator=generator, dtype=torch.float64)))


def _at(index: int) -> Tensor:
    return torch.tensor([index])


def _over_target_vocabulary(
    draft_probs: Tensor | None, step: int, token: int, vocab: Tensor | None, like: Tensor
) -> Tensor:
    if draft_probs is None:
        return torch.zeros_like(like).index_fill_(0, torch.tensor([token], device=like.device), 1)
    if vocab is None:
        return draft_probs[step]
    return torch.zeros_like(like).index_copy_(0, vocab.to(like.device), draft_probs[step])


def _draw_one(probs: Tensor, uniform: float) -> int:
    return int(draw(probs[None], torch.tensor([uniform], dtype=torch.float64)))
