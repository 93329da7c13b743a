"""A head: a draft that reads the target's states and shares its frozen embedding and `lm_head`.

The frozen tables are read from the target and never saved; a head may train a copy of its rows of `lm_head`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mtptrain.drafts.base.draft import Draft, DraftConfig
from mtptrain.drafts.base.proposal import Drawn, Proposal
from mtptrain.targets.base import Target


@dataclass(frozen=True)
class HeadConfig(DraftConfig):
    """What every head chooses: taps to read, and a reduced vocabulary to score.

    `draft_vocab` (ascending target ids) is filled in when training starts; empty: the whole vocabulary.
    """

    taps: tuple[str, ...] = ("final",)
    draft_vocab_size: int = 0  # 0: the target's whole vocabulary
    draft_vocab: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:  # Hydra and JSON hand over lists
        object.__setattr__(self, "taps", tuple(self.taps))
        object.__setattr__(self, "draft_vocab", tuple(self.draft_vocab))

    def trained(self) -> HeadConfig | None:
        return self


class Head(Draft):
    """A draft that reads the target's states. Frozen tables are outside the state dict: they are never saved."""

    def __init__(self, config: HeadConfig, target: Target, own_head: bool = False) -> None:
        """`own_head`: it scores with a trained copy of its rows of `lm_head`, not with the frozen ones."""
        super().__init__()
        self.config = config
        self.taps = config.taps
        self._shared = (target,)  # a tuple hides the frozen target from the module's parameters
        self.vocab = torch.tensor(config.draft_vocab) if config.draft_vocab else None
        weight = target.head_weight
        self._frozen = (weight if self.vocab is None else weight[self.vocab.to(weight.device)],)
        self.lm_head = trained_copy(self._frozen[0]) if own_head else None

    @property
    def target(self) -> Target:
        return self._shared[0]

    def frozen_rows(self) -> Tensor:
        return self._frozen[0]

    def own_head(self) -> Tensor | None:
        return None if self.lm_head is None else self.lm_head.weight

    def target_ids(self, index: Tensor) -> list[int]:
        """What drawn draft ids [B] are in the target's vocabulary."""
        return (index if self.vocab is None else self.vocab[index.cpu()]).tolist()


def trained_copy(rows: Tensor) -> nn.Linear:
    """A map of its own that starts as these rows [Vd, H] score, in fp32."""
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(rows.detach().float().clone())
    return head


def proposal_of(chains: Sequence[Sequence[int]], drawn: Sequence[Drawn], draft: Draft) -> Proposal:
    """Chains of B sequences, with the laws that their tokens were drawn from, step by step."""
    probs = [d.probs for d in drawn if d.probs is not None]
    joined = torch.stack(probs, 1) if probs else None
    return Proposal(tuple(tuple(x) for x in chains), joined, draft.vocab)
