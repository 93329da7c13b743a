"""Attention in plain PyTorch: the reference, and the fast path on CPU.

Three shapes of work, one rule each. Whole documents and prefill chunks: one SDPA call per sequence, so no
padding is computed; query heads are grouped by stride-0 expansion, so no key is copied per query head.
Decode and verify: every page is a unit of work for one batched GEMM over the pool as it lies in memory (no
gathering of keys), and the pages of a sequence are merged by log-sum-exp; a page shared by many sequences
is read once for all of them. Only pages with a key that some query must not see meet a mask, so that of a
token tree touches its own few pages, however long the context. Unrolled training steps: step-0 keys plus
the row's own later keys, for one query of each row or for a block of them. It gives up fused kernels: a GPU
wants the flashinfer backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtptrain.attention_backends.base import (
    AttentionBackend,
    ForwardContext,
    PagedBatch,
    UnrollCache,
    split_rows,
    tree_key_rows,
    tree_query_rows,
)

MAX_DECODE_QUERIES = (
    32  # beyond this many rows a sequence, one SDPA call per sequence is the faster path
)


@dataclass(frozen=True, eq=False)
class SharedPage:
    """A page that several sequences read: `users` are their indices, `entries` where their results stand."""

    page: int
    users: Tensor  # [U] int64
    entries: slice


@dataclass(frozen=True, eq=False)
class PagePlan:
    """Decode work by (page, sequence) entries: first the pages with one reader, then the shared ones."""

    num_own: int  # leading entries with a page of their own
    pages: Tensor | None  # [num_own] to gather; None: pages 0..num_own-1 as they lie in the pool
    shared: tuple[SharedPage, ...]
    owner: Tensor  # [E] int64, sequence of each entry; B stands for nobody
    masked: Tensor  # [M] int64, the entries with a key that some query does not see
    masked_rows: Tensor  # [M, 1 or Q, page_size] rows of their keys, as each query counts
    bias: Tensor  # [M, 1, 1, Q, page_size], 0 or -inf
    row_of: Tensor  # [B, Q] int64, packed row of each query, padded with the sequence's last row
    padded_of: Tensor  # [T] int64, inverse: place in [B * Q] of each packed row
    key_rows: Tensor  # [E, page_size] row index of each key
    query_rows: Tensor  # [B + 1, Q] row index of each query


class SdpaBackend(AttentionBackend):
    """See the file's opening. Token trees are decode work, whatever their size."""

    def __init__(self, max_decode_queries: int = MAX_DECODE_QUERIES) -> None:
        self.max_decode_queries = max_decode_queries

    def plan(self, query_lens: tuple[int, ...], paged: PagedBatch) -> object:
        if paged.tails is None and max(query_lens) > self.max_decode_queries:
            return None
        return _plan_pages(query_lens, paged)

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
            return _attend_unrolled(query, key, value, ctx, ctx.unroll, scale, window)
        if ctx.paged is None:
            return _attend_documents(query, key, value, ctx.query_lens, scale, window)
        _write_pages(key, value, ctx.paged, layer)
        if ctx.keys_only:
            return torch.zeros_like(query)
        if isinstance(ctx.plan, PagePlan):
            return _attend_pages(query, ctx.plan, ctx.paged, layer, scale, window)
        return _attend_chunks(query, key, value, ctx, ctx.paged, layer, scale, window)


# ---- whole documents and prefill chunks: one SDPA call per sequence -------------------------------------


def _grouped_sdpa(
    query: Tensor,  # [Tq, N, d]
    key: Tensor,  # [heads, Tk, d]
    value: Tensor,
    scale: float,
    mask: Tensor | None,  # [Tq, Tk] bool; None: causal over equal lengths
) -> Tensor:  # [Tq, N, d]
    heads, num_keys, dim = key.shape
    groups = query.shape[1] // heads
    q = query.view(-1, heads, groups, dim).permute(1, 2, 0, 3)
    k, v = (x[:, None].expand(heads, groups, num_keys, dim) for x in (key, value))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(query.shape)


def _lower_right(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> Tensor:
    """Causal mask [Tq, Tk] whose last query sees the last key; with a window, only the newest keys."""
    q = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    k = torch.arange(num_keys, device=device)[None]
    visible = k <= q
    return visible if window is None else visible & (q - k < window)


def _chunk_mask(tq: int, tk: int, window: int | None, device: torch.device) -> Tensor | None:
    """None where plain causal attention does; rows with one query and no window see every key."""
    return (
        None
        if tq == tk and (window is None or tk <= window)
        else _lower_right(tq, tk, window, device)
    )


def _attend_documents(
    query: Tensor, key: Tensor, value: Tensor, lens: Sequence[int], scale: float, window: int | None
) -> Tensor:
    out = [
        _grouped_sdpa(
            q,
            k.transpose(0, 1),
            v.transpose(0, 1),
            scale,
            _chunk_mask(len(q), len(q), window, q.device),
        )
        for q, k, v in zip(*(split_rows(x, lens) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(out)


def _attend_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ctx: ForwardContext,
    paged: PagedBatch,
    layer: int,
    scale: float,
    window: int | None,
) -> Tensor:
    out = []
    chunks = zip(*(split_rows(x, ctx.query_lens) for x in (query, key, value)), strict=True)
    for (q, k, v), table, kv_len in zip(chunks, paged.page_tables, paged.kv_lens, strict=True):
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        if kv_len > len(q):  # earlier chunks or a shared prefix lie in the pages
            k, v = (_gather(x[layer], table, kv_len) for x in (paged.keys, paged.values))
        out.append(_grouped_sdpa(q, k, v, scale, _chunk_mask(len(q), kv_len, window, q.device)))
    return torch.cat(out)


def _gather(pool: Tensor, table: Tensor, kv_len: int) -> Tensor:  # [heads, kv_len, d]
    pages = pool[table.to(pool.device)].transpose(0, 1)  # [heads, pages, page_size, d]
    return pages.flatten(1, 2)[:, :kv_len]


def _write_pages(key: Tensor, value: Tensor, paged: PagedBatch, layer: int) -> None:
    page, offset = paged.slots // paged.page_size, paged.slots % paged.page_size
    paged.keys[layer][page, :, offset] = key
    paged.values[layer][page, :, offset] = value


# ---- decode and verify: pages as units of one batched GEMM ------------------------------------------------


def _plan_pages(query_lens: tuple[int, ...], paged: PagedBatch) -> PagePlan:
    num_seqs, width, size = len(query_lens), max(query_lens), paged.page_size
    device = paged.slots.device
    tables = [t[: -(-n // size)] for t, n in zip(paged.page_tables, paged.kv_lens, strict=True)]
    page = torch.cat(tables)
    counts = torch.tensor([len(t) for t in tables])
    seq = torch.repeat_interleave(torch.arange(num_seqs), counts)
    index = torch.cat([torch.arange(len(t)) for t in tables])  # which page of its sequence
    readers = torch.bincount(page)
    own = readers[page] == 1
    own_page, own_seq, own_index = page[own], seq[own], index[own]
    span = int(own_page.max()) + 1 if len(own_page) else 0
    pages: Tensor | None = own_page
    if span <= 2 * len(
        own_page
    ):  # dense enough: read the pool as it lies, pages of nobody are masked
        pages = None
        own_seq = torch.full((span,), num_seqs).index_copy(0, own_page, own_seq)
        own_index = torch.zeros(span, dtype=torch.long).index_copy(0, own_page, own_index)
    shared, shared_seq, shared_index = _group_shared(
        page[~own], seq[~own], index[~own], len(own_seq), device
    )
    owner = torch.cat([own_seq, shared_seq])
    key_rows = torch.cat([own_index, shared_index])[:, None] * size + torch.arange(size)
    row_of, padded_of, query_rows = _query_layout(query_lens, paged.kv_lens, width)
    tail_lens = query_lens if paged.tails is None else [t.shape[1] for t in paged.tails]
    first = torch.tensor([*paged.kv_lens, 0]) - torch.tensor([*tail_lens, 0])
    masked = (key_rows[:, -1] >= first[owner]).nonzero().squeeze(1)  # pages of nobody too
    masked_rows = key_rows[masked][:, None]
    if paged.tails is not None:
        query_rows = tree_query_rows(query_rows, paged.tails, first)
        masked_rows = tree_key_rows(masked_rows, owner[masked], paged.tails, first, width)
    bias = _bias(owner[masked], masked_rows, query_rows, None)
    tensors = (owner, masked, masked_rows, bias, row_of, padded_of, key_rows, query_rows)
    pages = pages if pages is None else pages.to(device)
    return PagePlan(len(own_seq), pages, shared, *(x.to(device) for x in tensors))


def _group_shared(
    page: Tensor, seq: Tensor, index: Tensor, first_entry: int, device: torch.device
) -> tuple[tuple[SharedPage, ...], Tensor, Tensor]:
    order = torch.argsort(page, stable=True)
    page, seq, index = page[order], seq[order], index[order]
    distinct, counts = torch.unique_consecutive(page, return_counts=True)
    groups, at = [], 0
    for p, n in zip(distinct.tolist(), counts.tolist(), strict=True):
        entries = slice(first_entry + at, first_entry + at + n)
        groups.append(SharedPage(p, seq[at : at + n].to(device), entries))
        at += n
    return tuple(groups), seq, index


def _query_layout(
    query_lens: tuple[int, ...], kv_lens: tuple[int, ...], width: int
) -> tuple[Tensor, Tensor, Tensor]:
    lens = torch.tensor(query_lens)
    start = torch.cumsum(lens, 0) - lens
    column = torch.arange(width)[None]
    row_of = start[:, None] + torch.minimum(column, lens[:, None] - 1)
    query_rows = torch.tensor(kv_lens)[:, None] - lens[:, None] + column
    query_rows = torch.cat([query_rows, torch.full((1, width), -1)])  # nobody sees nothing
    padded_of = (torch.arange(len(lens))[:, None] * width + column)[column < lens[:, None]]
    return row_of, padded_of, query_rows


def _bias(owner: Tensor, key_rows: Tensor, query_rows: Tensor, window: int | None) -> Tensor:
    """[E, 1, 1, Q, page_size]; `key_rows` [E, 1 or Q, page_size]."""
    distance = query_rows[owner][:, :, None] - key_rows
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    bias = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    return bias[:, None, None]


def _window_bias(plan: PagePlan, window: int) -> Tensor:
    """Of all entries: a window hides keys in any page."""
    bias = _bias(plan.owner, plan.key_rows[:, None], plan.query_rows, window)
    mine = plan.owner[plan.masked]
    bias[plan.masked] = _bias(mine, plan.masked_rows, plan.query_rows, window)
    return bias


def _attend_pages(
    query: Tensor,  # [T, N, d]
    plan: PagePlan,
    paged: PagedBatch,
    layer: int,
    scale: float,
    window: int | None,
) -> Tensor:
    keys, values = paged.keys[layer], paged.values[layer]
    (batch, width), (_, heads, size, dim) = plan.row_of.shape, keys.shape
    groups = query.shape[1] // heads
    q = (query * scale)[plan.row_of].view(batch, width, heads, groups, dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(batch, heads, groups * width, dim)
    q = torch.cat([q, q.new_zeros(1, heads, groups * width, dim)])  # the entry of nobody
    scores = _page_products(q, keys.transpose(2, 3), plan, per_query=None)
    scores = scores.view(-1, heads, groups, width, size)
    if window is None:
        scores[plan.masked] += plan.bias
    else:
        scores.add_(_window_bias(plan, window))
    scores = scores.flatten(2, 3)
    top = scores.amax(-1)  # [E, heads, G * Q]
    weights = scores.sub_(top.clamp(min=torch.finfo(top.dtype).min)[..., None]).exp_()
    partial = _page_products(q, values, plan, per_query=weights)
    out = _merge(top, weights.sum(-1), partial, plan.owner, batch)
    out = out.view(batch, heads, groups, width, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch * width, heads * groups, dim)[plan.padded_of]


def _page_products(
    query: Tensor,  # [B + 1, heads, R, d]
    pool: Tensor,  # [P, heads, a, b]
    plan: PagePlan,
    per_query: Tensor
    | None,  # [E, heads, R, a]: weights to multiply with; None: the queries themselves
) -> Tensor:  # [E, heads, R, b]
    own = slice(0, plan.num_own)
    left = query[plan.owner[own]] if per_query is None else per_query[own]
    right = pool[: plan.num_own] if plan.pages is None else pool[plan.pages]
    products = [torch.matmul(left, right)]
    for s in plan.shared:
        mine = query[s.users] if per_query is None else per_query[s.entries]
        flat = mine.transpose(0, 1).flatten(1, 2)  # [heads, U * R, a]
        product = torch.bmm(flat, pool[s.page]).unflatten(1, (len(s.users), -1))
        products.append(product.transpose(0, 1))
    return torch.cat(products) if len(products) > 1 else products[0]


def _merge(top: Tensor, total: Tensor, partial: Tensor, owner: Tensor, batch: int) -> Tensor:
    """Joins the pages of each sequence by log-sum-exp: [E, heads, R(, d)] to [B, heads, R, d]."""
    shape = (batch + 1, *top.shape[1:])
    peak = torch.full(shape, float("-inf"), dtype=top.dtype, device=top.device)
    peak.scatter_reduce_(0, owner[:, None, None].expand_as(top), top, "amax")
    weight = torch.exp(top - peak.clamp(min=torch.finfo(top.dtype).min)[owner])
    norm = top.new_zeros(shape).index_add_(0, owner, total * weight)
    out = top.new_zeros(*shape, partial.shape[-1]).index_add_(0, owner, partial * weight[..., None])
    return out[:batch] / norm[:batch, ..., None]


# ---- unrolled training steps ------------------------------------------------------------------------------


def _attend_unrolled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ctx: ForwardContext,
    cache: UnrollCache,
    scale: float,
    window: int | None,
) -> Tensor:
    if cache.mode == "record":
        cache.step0 = (key, value)
        if ctx.keys_only:
            return torch.zeros_like(query)
        return _attend_documents(query, key, value, ctx.query_lens, scale, window)
    assert cache.step0 is not None, "step 0 records its keys before a later step reads them"
    width = 1 if cache.seen is None else len(cache.seen)
    cache.own += zip(*(x.unflatten(0, (-1, width)).unbind(1) for x in (key, value)), strict=True)
    own_k, own_v = (torch.stack(x, dim=1) for x in zip(*cache.own, strict=True))  # [R, J, heads, d]
    seen = torch.ones(1, len(cache.own), dtype=torch.bool) if cache.seen is None else cache.seen
    rows = _local_rows(cache, ctx.query_lens)
    mine = (query.unflatten(0, (-1, width)), own_k, own_v, rows)
    mine = zip(*(split_rows(x, cache.rows_per_document) for x in mine), strict=True)
    step0 = zip(*(split_rows(x, ctx.query_lens) for x in cache.step0), strict=True)
    out = [
        _own_and_step0(q, ok, ov, r, k, v, seen.to(q.device), scale, window)
        for (q, ok, ov, r), (k, v) in zip(mine, step0, strict=True)
        if len(q)
    ]
    return torch.cat(out).flatten(0, 1) if out else torch.zeros_like(query)


def _local_rows(cache: UnrollCache, lens: tuple[int, ...]) -> Tensor:
    """Row index inside its document of each row that goes on."""
    lengths = torch.tensor(lens, device=cache.rows.device)
    start = torch.cumsum(lengths, 0) - lengths
    per_document = torch.tensor(cache.rows_per_document, device=cache.rows.device)
    return cache.rows - torch.repeat_interleave(start, per_document)


def _own_and_step0(
    query: Tensor,  # [R, S, N, d]
    own_k: Tensor,  # [R, J, heads, d]
    own_v: Tensor,
    rows: Tensor,  # [R]
    key: Tensor,  # [T, heads, d]
    value: Tensor,
    seen: Tensor,  # [S, J] bool
    scale: float,
    window: int | None,
) -> Tensor:  # [R, S, N, d]
    """One document: softmax over the step-0 keys up to the row and the row's own keys that a query sees."""
    (num_rows, width), (num_keys, heads) = query.shape[:2], key.shape[:2]
    q = (query * scale).unflatten(2, (heads, -1))  # [R, S, heads, G, d]
    folded = q.permute(2, 3, 0, 1, 4).flatten(1, 3)  # no key is copied per query head
    past = torch.bmm(folded, key.permute(1, 2, 0)).unflatten(1, (-1, num_rows, width))
    unseen_past, unseen = _unseen(rows, num_keys, seen, window)
    past = past.masked_fill(unseen_past, float("-inf"))  # [heads, G, R, S, T]
    mine = torch.einsum("rshgd,rjhd->hgrsj", q, own_k)
    if bool(unseen.any()):
        mine = mine.masked_fill(unseen, float("-inf"))
    p = torch.softmax(torch.cat([past, mine], -1).float(), -1).to(value.dtype)
    p_past, p_mine = p.split([num_keys, own_k.shape[1]], -1)
    out = torch.bmm(p_past.flatten(1, 3), value.transpose(0, 1)).view_as(folded)
    out = out.view(heads, -1, num_rows, width, query.shape[-1])
    out = out + torch.einsum("hgrsj,rjhd->hgrsd", p_mine, own_v)
    return out.permute(2, 3, 0, 1, 4).reshape(query.shape)


def _unseen(rows: Tensor, num_keys: int, seen: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """What is hidden of a document's step-0 keys, [R, 1 or S, T], and of a row's own keys, [S, J]."""
    key_row = torch.arange(num_keys, device=rows.device)
    past, own = (key_row > rows[:, None])[:, None], ~seen
    if window is not None:
        place = seen.cumsum(1)
        last = place[:, -1:]  # [S, 1]
        past = past | (rows[:, None, None] + last - key_row >= window)
        own = own | (last - place >= window)
    return past, own
