"""What a draft answers with: chains or token trees, and the laws that their tokens were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    in the order of their first children. `confidence` [B, D], or [D] for each sequence, is the draft's own guess of
    the chance that a token holds if those before it do, made before the token was drawn; None for all or one: it
    does not say.
    """

    token_ids: tuple[tuple[int, ...], ...]
    probs: Tensor | Sequence[Tensor | None] | None = None
    vocab: Tensor | None = (
        None  # [Vd] target id of each draft id; None: the target's own vocabulary
    )
    parents: tuple[tuple[int, ...], ...] | None = None  # None: chains
    scores: tuple[float, ...] | None = None  # [B] tokens it hopes to have accepted; None: unknown
    confidence: Tensor | Sequence[Tensor | None] | None = None

    def cut(self, least: float) -> Proposal:
        """Ends each chain before the chance that all of it holds falls below `least`. Whether a token is proposed
        does not depend on the token, so its law stays that of `probs`."""
        if self.confidence is None or not least:
            return self
        kept = [
            len(chain) if sure is None else int((sure.cumprod(0) >= least).sum())
            for chain, sure in zip(self.token_ids, self.confidence, strict=True)
        ]
        chains = tuple(chain[:n] for chain, n in zip(self.token_ids, kept, strict=True))
        return replace(self, token_ids=chains)
