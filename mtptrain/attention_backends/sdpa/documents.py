"""Whole documents and prefill chunks: one SDPA call per sequence; see the package's opening."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mtptrain.attention_backends.base import ForwardContext, PagedBatch, split_rows


def grouped_sdpa(
    query: Tensor,  # [Tq, N, d]
    key: Tensor,  # [heads, Tk, d]
    value: Tensor,
    scale: float,
    mask: Tensor | None,  # [Tq, Tk] bool; None: causal over equal lengths
) -> Tensor:  # [Tq, N, d]
    """One fused call; no key is copied per query head."""
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


def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """The queries of a document are its last rows."""
    keys = [split_rows(x.transpose(0, 1), key_lens, 1) for x in (key, value)]
    out = [
        grouped_sdpa(q, k, v, scale, _chunk_mask(len(q), k.shape[1], window, q.device))
        for q, k, v in zip(split_rows(query, query_lens), *keys, strict=True)
        if len(q)
    ]
    return torch.cat(out)


def attend_chunks(
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
            k, v = (gather(x[layer], table, kv_len) for x in (paged.keys, paged.values))
        out.append(grouped_sdpa(q, k, v, scale, _chunk_mask(len(q), kv_len, window, q.device)))
    return torch.cat(out)


def gather(pool: Tensor, table: Tensor, kv_len: int) -> Tensor:
    """The first rows of one sequence, [heads, kv_len, d], from a layer's pages [P, heads, page_size, d]."""
    pages = pool[table.to(pool.device)].transpose(0, 1)  # [heads, pages, page_size, d]
    return pages.flatten(1, 2)[:, :kv_len]
