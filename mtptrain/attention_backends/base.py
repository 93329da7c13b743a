"""What every attention backend is given and must return, and how transformers networks reach it.

A network from transformers calls one registered function for its attention; `ForwardContext` travels to it
as a keyword argument. So one mechanism serves every family, for packed training batches, paged decoding and
unrolled training steps, with no copied model code. It gives up dense [B, T] batches: a batch is one row of
packed tokens, and no masks are built by transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mtptrain.types import UserError

ATTENTION_NAME = "mtptrain"
UNSEEN = 1 << 40  # row of a key that a query does not see: above every query


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """Where one forward writes its keys and values and which pages each sequence reads.

    Row index = place of a token in its sequence; a query sees the keys whose row index is not above its own.
    Where `tails` are given, the newest rows of each sequence are a token tree: of them a query sees those that
    its mask names (its ancestors and itself), below them all. It stands at the place that the number of keys
    it sees gives it, which is what a sliding window counts from.
    """

    keys: Sequence[Tensor]  # per layer [P, heads, page_size, head_dim]
    values: Sequence[Tensor]
    page_size: int
    page_tables: tuple[Tensor, ...]  # per sequence [pages of it] int64, on the host
    kv_lens: tuple[int, ...]  # per sequence, the rows of this forward included
    slots: Tensor  # [T] int64, page * page_size + offset of each packed row
    tails: tuple[Tensor, ...] | None = None  # per sequence [queries, newest rows] bool, on the host


@dataclass(eq=False)
class UnrollCache:
    """Keys and values of one layer's training unroll: step 0 covers all rows, later steps their own rows only.

    Written by attention during the forward: `mode` tells it whether to record step 0 or to extend the own rows.
    Step 0 may come in two forwards, of which the first has the first rows of each document and is `keys_only`.
    A row extends by one query and its key, or, where `seen` is given, once by a block of S of them, which lie
    next to each other: each query sees the step-0 keys up to its row and what `seen` names of its own block.
    As in the tails of `PagedBatch` it stands at the place that the number of keys it sees gives it.
    """

    rows: Tensor  # [R] int64, packed indices of the rows that go on after step 0
    rows_per_document: tuple[int, ...]
    mode: Literal["record", "extend"] = "record"
    step0: tuple[Tensor, Tensor] | None = None  # [T, heads, d] each
    step0_lens: tuple[int, ...] = ()  # rows of each document in it
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # [R, heads, d] each
    seen: Tensor | None = None  # [S, S] bool

    def narrow(self, keep: Tensor, rows_per_document: tuple[int, ...]) -> None:
        """Goes on with the rows where `keep` [R] holds."""
        self.rows, self.rows_per_document = self.rows[keep], rows_per_document
        self.own = [(k[keep], v[keep]) for k, v in self.own]


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """All that attention must know about a packed batch; built once per forward and shared by its layers."""

    backend: AttentionBackend
    query_lens: tuple[int, ...]  # packed rows of each sequence or document
    paged: PagedBatch | None = None
    unroll: UnrollCache | None = None
    plan: object = None  # what the backend prepared for this forward
    keys_only: bool = (
        False  # its rows leave their keys and values, and nobody reads what they attend to
    )

    @classmethod
    def packed(cls, backend: AttentionBackend, lens: Sequence[int]) -> ForwardContext:
        """Whole documents, causal, nothing cached."""
        return cls(backend, tuple(lens))

    @classmethod
    def over_pages(
        cls, backend: AttentionBackend, lens: Sequence[int], paged: PagedBatch
    ) -> ForwardContext:
        return cls(backend, tuple(lens), paged, plan=backend.plan(tuple(lens), paged))


class AttentionBackend(ABC):
    """Computes causal attention of packed queries; keys and values are never repeated per query head."""

    @abstractmethod
    def plan(self, query_lens: tuple[int, ...], paged: PagedBatch) -> object:
        """Prepares index tensors once per forward, for all its layers."""

    @abstractmethod
    def attend(
        self,
        query: Tensor,  # [T, heads * G, d]
        key: Tensor,  # [T, heads, d]
        value: Tensor,  # [T, heads, d]
        ctx: ForwardContext,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:  # [T, heads * G, d]
        """Writes key and value where the context says, then attends; with `keys_only` the result means nothing."""


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, N, T, d]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    ctx: ForwardContext,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
    **family_flags: object,  # each family passes flags of its own; those that change the result are named above
) -> tuple[Tensor, None]:
    if softcap or s_aux is not None:
        raise UserError(
            f"{type(module).__name__} uses logit soft-capping or attention sinks, which this attention backend "
            "does not compute; choose another target family"
        )
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = ctx.backend.attend(q, k, v, ctx, layer, scaling, sliding_window)
    return out[None], None


def _no_mask(*args: object, **kwargs: object) -> None:
    """Our attention masks by itself: transformers must build nothing."""


def register() -> str:
    """Makes the attention known to transformers (idempotent); returns the `attn_implementation` name to load with."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)
    return ATTENTION_NAME


def split_rows(x: Tensor, lens: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Views of the packed rows of each document."""
    return torch.split(x, list(lens), dim)


def tree_query_rows(query_rows: Tensor, tails: tuple[Tensor, ...], first: Tensor) -> Tensor:
    """A node stands behind the keys that it sees, [B + 1, Q]."""
    rows = query_rows.clone()
    for i, tail in enumerate(tails):
        rows[i, : len(tail)] = first[i] + tail.sum(1) - 1
    return rows


def tree_key_rows(
    key_rows: Tensor,  # [M, 1, page_size]
    owner: Tensor,  # [M]
    tails: tuple[Tensor, ...],
    first: Tensor,  # [B + 1] row where each sequence's tail begins
    width: int,
) -> Tensor:  # [M, Q, page_size]
    """The row of each key as each query counts: in a tail, its place among the keys that the query sees."""
    longest = max(t.shape[1] for t in tails)
    place = torch.full((len(tails) + 1, width, longest + 1), UNSEEN)
    for i, tail in enumerate(tails):
        counted = first[i] + tail.cumsum(1) - 1
        place[i, : len(tail), : tail.shape[1]] = counted.masked_fill(~tail, UNSEEN)
    offset = key_rows - first[owner][:, None, None]
    query = torch.arange(width)[None, :, None]
    inside = place[owner[:, None, None], query, offset.clamp(0, longest)]
    return torch.where(offset < 0, key_rows, inside)
