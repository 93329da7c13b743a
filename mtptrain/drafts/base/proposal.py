"""What a draft answers with: chains or token trees, and the laws that their tokens were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Drawn:
    """Tokens drawn from a draft's logits, with the very distribution they were drawn from."""

    token: Tensor  # [B] index into the draft vocabulary
    probs: Tensor | None  # [B, Vd]; None: a point mass (greedy)


class Draw(Protocol):
    """Draws a token for each row of logits from the stream of its sequence."""

    def __call__(self, logits: Tensor, among: Sequence[int] | None = None) -> Drawn:
        """logits [B, Vd]; of the sequences `among` all those of the step, where not all have a row."""
        ...


@dataclass(frozen=True, eq=False)
class Proposal:
    """A chain or a token tree for each of B sequences. `token_ids` may be ragged; an empty one means no proposal.

    `probs` [B, D, Vd] are the laws that the tokens were drawn from, or for each sequence its own [D, Vd]; None
    for all or one: every token was certain (q is a point mass). Where `parents` are given, all are trees: the
    parent of token i is token parents[i] < i, or the newest true token where that is -1 (see `runtime.tree`);
    `probs` then has the laws that children were drawn from without replacement, one for each node that has any,
    in the order of their first children.
    """

    token_ids: tuple[tuple[int, ...], ...]
    probs: Tensor | Sequence[Tensor | None] | None = None
    vocab: Tensor | None = (
        None  # [Vd] target id of each draft id; None: the target's own vocabulary
    )
    parents: tuple[tuple[int, ...], ...] | None = None  # None: chains
    scores: tuple[float, ...] | None = None  # [B] tokens it hopes to have accepted; None: unknown
