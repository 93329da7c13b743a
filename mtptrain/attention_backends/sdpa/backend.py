"""Which shape of work a forward is; see the package's opening."""

from __future__ import annotations

import torch
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext, PagedBatch
from mtptrain.attention_backends.sdpa.documents import attend_chunks, attend_documents
from mtptrain.attention_backends.sdpa.pages import PagePlan, attend_pages, plan_pages, write_pages
from mtptrain.attention_backends.sdpa.trees import attend_trees
from mtptrain.attention_backends.sdpa.unroll import attend_unrolled

MAX_DECODE_QUERIES = 8  # rows a sequence; beyond, gathering its keys for one fused call is faster


class SdpaBackend(AttentionBackend):
    """See the package's opening."""

    def __init__(self, max_decode_queries: int = MAX_DECODE_QUERIES) -> None:
        self.max_decode_queries = max_decode_queries

    def plan(self, query_lens: tuple[int, ...], paged: PagedBatch) -> object:
        if max(query_lens) > self.max_decode_queries:
            return None
        return plan_pages(query_lens, paged)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ctx: ForwardContext,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        if ctx.unroll is not None:
            return attend_unrolled(query, key, value, ctx, ctx.unroll, scale, window)
        if ctx.paged is None:
            lens = (ctx.query_lens, ctx.query_lens)
            return attend_documents(query, key, value, *lens, scale, window)
        write_pages(key, value, ctx.paged, layer)
        if ctx.keys_only:
            return torch.zeros_like(query)
        if isinstance(ctx.plan, PagePlan):
            return attend_pages(query, ctx.plan, ctx.paged, layer, scale, window)
        if ctx.paged.tails is not None:
            return attend_trees(query, ctx, ctx.paged, ctx.paged.tails, layer, scale, window)
        return attend_chunks(query, key, value, ctx, ctx.paged, layer, scale, window)
