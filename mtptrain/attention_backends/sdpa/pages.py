"""Decode and verify: pages as units of one batched GEMM; see the package's opening."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.attention_backends.base import PagedBatch, tree_key_rows, tree_query_rows


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


def write_pages(key: Tensor, value: Tensor, paged: PagedBatch, layer: int) -> None:
    page, offset = paged.slots // paged.page_size, paged.slots % paged.page_size
    paged.keys[layer][page, :, offset] = key
    paged.values[layer][page, :, offset] = value


def plan_pages(query_lens: tuple[int, ...], paged: PagedBatch) -> PagePlan:
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


def attend_pages(
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
