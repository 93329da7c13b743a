"""The contract between a draft, the trainer that fits it and the runtime that serves it.

A draft is built from a frozen config (`DraftConfig.build(target)`), trained through `unroll` on whole packed
documents, and served through `refill` and `propose` on pages: one file does both, so what is trained is what
is served. The frozen embedding and `lm_head` are read from the target and never saved (`Head`). A draft that
cannot be trained leaves `unroll` alone; one that keeps no pages leaves `refill` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext
from mtptrain.targets.base import Target
from mtptrain.types import Completion, DraftBatch


class Pages(Protocol):
    """The draft's layers of the shared KV pool, for the sequences of one step."""

    def context(
        self, first_rows: Sequence[int], lens: Sequence[int], tails: Sequence[Tensor] | None = None
    ) -> ForwardContext:
        """A context for rows first..first + len - 1 of each sequence; what lies above is overwritten.
        `tails` says what each row of a token tree sees, as in `PagedBatch`."""
        ...


@dataclass(frozen=True, eq=False)
class SomePages:
    """The pages of `places` among the `count` sequences of a step."""

    pages: Pages
    places: tuple[int, ...]
    count: int

    def context(
        self, first_rows: Sequence[int], lens: Sequence[int], tails: Sequence[Tensor] | None = None
    ) -> ForwardContext:
        first, rows = [0] * self.count, [0] * self.count
        for place, a, n in zip(self.places, first_rows, lens, strict=True):
            first[place], rows[place] = a, n
        return self.pages.context(first, rows, tails)


@dataclass(frozen=True, eq=False)
class TrueRows:
    """Rows whose true target features are known, for B sequences packed one after another.

    Row t of a sequence stands for token t: it holds the features of token t, and its next token
    `token_ids[t + 1]` is known. After a verify pass these are the accepted rows; the last one drafts.
    """

    token_ids: tuple[list[int], ...]  # per sequence, every token so far
    first_rows: tuple[int, ...]
    lens: tuple[int, ...]
    features: Tensor  # [T, W]
    pages: Pages
    memories: tuple[dict[str, Any], ...]  # per sequence, what the draft itself keeps between steps
    common: dict[str, Any] = field(default_factory=dict)  # kept over all sequences of one engine

    def some(self, places: Sequence[int]) -> TrueRows:
        """The rows of some of the sequences, ascending."""
        parts = self.features.split(list(self.lens))
        return replace(
            self,
            token_ids=tuple(self.token_ids[i] for i in places),
            first_rows=tuple(self.first_rows[i] for i in places),
            lens=tuple(self.lens[i] for i in places),
            features=torch.cat([self.features[:0], *(parts[i] for i in places)]),
            pages=SomePages(self.pages, tuple(places), len(self.lens)),
            memories=tuple(self.memories[i] for i in places),
        )


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
    for all or one: every token was certain (q is a point mass). Where `parents` are given, all are trees whose
    tokens are certain: the parent of token i is token parents[i] < i, or the newest true token where that is -1
    (see `runtime.tree`).
    """

    token_ids: tuple[tuple[int, ...], ...]
    probs: Tensor | Sequence[Tensor | None] | None = None
    vocab: Tensor | None = (
        None  # [Vd] target id of each draft id; None: the target's own vocabulary
    )
    parents: tuple[tuple[int, ...], ...] | None = None  # None: chains
    scores: tuple[float, ...] | None = None  # [B] tokens it hopes to have accepted; None: unknown


@dataclass(frozen=True, eq=False)
class UnrollStep:
    """Supervised rows of one unrolled step."""

    states: Tensor  # [R, H] what the rows of `head_rows` score
    target_rows: Tensor  # [R] packed index of the token whose final feature is the target's state
    label_rows: Tensor  # [R] packed index of the predicted token


class DraftConfig(ABC):
    """A frozen dataclass of a mechanism's choices, built by Hydra from the recipe of the same name."""

    @property
    def grows_trees(self) -> bool:
        """Whether its draft has `start` and `step`, from which the runtime grows token trees."""
        return False

    @abstractmethod
    def build(self, target: Target) -> Draft:
        """A draft for this target; weights start as the mechanism prescribes."""


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


class Draft(nn.Module):
    """Base of every draft. `taps` names the features it reads, `num_kv_layers` its layers in the pool."""

    config: Any  # the DraftConfig it was built from; each mechanism has its own class
    taps: tuple[str, ...] = ()
    num_kv_layers: int = 0
    max_draft_tokens: int | None = None  # None: any length
    shares_prefix: bool = (
        True  # pages of a common prefix suffice; False where memories matter as well
    )
    vocab: Tensor | None = None  # [Vd] target ids, ascending
    concat_order: tuple[str, ...] = ("embedding", "feature")  # what a row reads
    position_rule: str = "row t at unrolled step j sits at position t + j"

    def unroll(
        self, batch: DraftBatch, steps: int, supervised: Tensor, backend: AttentionBackend
    ) -> Iterator[UnrollStep]:
        """Yields each unrolled step's supervised rows (design §5.1).

        `supervised` [T] is m at the first step; later steps are trained on answer rows only
        (`batch.loss_mask`), which are the rows that a server unrolls.
        """
        raise NotImplementedError(f"{type(self).__name__} is not trained")

    def label_rows(self, batch: DraftBatch, steps: int, supervised: Tensor) -> list[Tensor]:
        """The `label_rows` of each step that `unroll` would yield, found without running anything.

        Those of an autoregressive head; `batch` needs no features.
        """
        chain = answer_chain(batch, min(steps, self.max_draft_tokens or steps), supervised)
        return [rows.nonzero().squeeze(1) + 2 + j for j, rows in enumerate(chain)]

    def reads_ahead(self, step: int) -> int:
        """How many tokens behind its own feature a row has read at an unrolled step; 0: nothing but features.

        That of an autoregressive head, which reads every token before the one it drafts.
        """
        return 1 + step

    def calibrate(self, features: Tensor) -> None:
        """Adapts the untrained start to some real features [R, W]; called once, before training."""

    def refill(self, rows: TrueRows) -> None:
        """Fills pages during prefill, for rows that do not draft yet."""

    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        """Refills pages with the true rows, then drafts from each sequence's last row."""
        raise NotImplementedError

    def start(self, rows: TrueRows) -> Tensor:
        """Refills pages with the true rows; the state of each sequence's last one, [B, H]."""
        raise NotImplementedError

    def step(self, ids: Tensor, states: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """One drafted row each: reads token `ids` [T] behind the state that proposed it; states [T, H] to [T, H]."""
        raise NotImplementedError

    def scored(self, state: Tensor) -> Tensor:
        """What the rows of `head_rows` score of a state of `start` or `step`, [..., H] to [..., H]."""
        return state

    def finish(self, completion: Completion, common: dict[str, Any]) -> None:
        """Hears of a sequence that has ended; `common` is that of `TrueRows`.

        What is learnt here may change later proposals, and so which tokens are drafted, with the order in
        which sequences end; greedy output and the law of sampled output stay the target's.
        """

    def frozen_rows(self) -> Tensor:
        """[Vd, H] the target's rows of `lm_head` for the tokens that this draft can say."""
        raise NotImplementedError

    def own_head(self) -> Tensor | None:
        """[Vd, H] trained rows in place of the frozen ones; None: it scores with the target's."""
        return None

    def head_rows(self) -> Tensor:
        """[Vd, H] the rows that score this draft's states."""
        own = self.own_head()
        return self.frozen_rows() if own is None else own


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
        self.lm_head = _trained_copy(self._frozen[0]) if own_head else None

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


def _trained_copy(rows: Tensor) -> nn.Linear:
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(rows.detach().float().clone())
    return head


def proposal_of(chains: Sequence[Sequence[int]], drawn: Sequence[Drawn], draft: Draft) -> Proposal:
    """Chains of B sequences, with the laws that their tokens were drawn from, step by step."""
    probs = [d.probs for d in drawn if d.probs is not None]
    joined = torch.stack(probs, 1) if probs else None
    return Proposal(tuple(tuple(x) for x in chains), joined, draft.vocab)


def answer_chain(batch: DraftBatch, steps: int, supervised: Tensor) -> Tensor:
    """`supervised_chain` of the first step; later ones are for answer rows alone, [steps, T] bool."""
    chain = supervised_chain(supervised, batch.cu_seqlens, steps)
    chain[1:] &= supervised_chain(batch.loss_mask, batch.cu_seqlens, steps)[1:]
    return chain


def supervised_chain(mask: Tensor, cu_seqlens: Tensor, steps: int) -> Tensor:
    """Which rows are supervised at each step, [steps, T] bool: row t at step j iff m[t+1] .. m[t+2+j] all hold.

    Exactly the rows a server would run (design §5.1); nothing crosses a document border.
    """
    total = len(mask)
    document = torch.bucketize(torch.arange(total, device=mask.device), cu_seqlens[1:], right=True)
    alive = torch.ones_like(mask)
    chain = []
    for offset in range(1, steps + 2):
        ahead = torch.zeros_like(mask)
        if offset < total:
            ahead[:-offset] = mask[offset:] & (document[offset:] == document[:-offset])
        alive = alive & ahead
        if offset >= 2:
            chain.append(alive)
    return torch.stack(chain)
