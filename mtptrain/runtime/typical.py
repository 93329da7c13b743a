"""Typical acceptance: a drafted token holds where the target finds it likely enough. Not lossless.

Of a state's law p a token is typical where p(x) > min(threshold, alpha * exp(-H(p))): the flatter the law, the less
is asked (Medusa, arXiv 2401.10774; its code has 0.09 and 0.3). The longest path of typical tokens is accepted, of
equals the likeliest, and the next token is drawn from the typical ones, of which the best always is one. More is
accepted than by rejection sampling, and what is said no longer follows the target's law: it is sharper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtptrain.runtime.sampler import draw
from mtptrain.runtime.tree import ROOT, Tree

Reached = tuple[int, float]  # depth of a node and the log-probability of its path


def typical_part(laws: Tensor, threshold: float, alpha: float) -> Tensor:
    """`laws` [R, V] with 0 in place of what is not typical, [R, V] float64; alpha below 1."""
    laws = laws.double()
    entropy = torch.special.entr(laws).sum(-1, keepdim=True)
    bound = (alpha * torch.exp(-entropy)).clamp(max=threshold)
    return laws.masked_fill(laws <= bound, 0)


def verify_typical(
    tree: Tree,  # n nodes
    laws: Tensor,  # [n + 1, V] of the root's row and of each node's
    threshold: float,
    alpha: float,
    generator: torch.Generator,
) -> tuple[list[int], int]:
    """(accepted path, next token); draws one number, for the token."""
    typical = typical_part(laws, threshold, alpha)
    reached: dict[int, Reached] = {ROOT: (0, 0.0)}
    rows = [parent + 1 for parent in tree.parents]
    chances = typical[rows, list(tree.token_ids)].log().tolist()
    for node, (parent, chance) in enumerate(zip(tree.parents, chances, strict=True)):
        if parent in reached and chance > float("-inf"):
            depth, score = reached[parent]
            reached[node] = (depth + 1, score + chance)
    end = max(reached, key=reached.__getitem__)
    number = torch.rand(1, generator=generator, dtype=torch.float64)
    return tree.path(end), int(draw(typical[end + 1][None], number))
