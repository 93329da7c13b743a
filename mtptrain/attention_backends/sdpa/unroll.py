"""Unrolled training steps: step-0 keys and the row's own later ones; see the package's opening.

A document's scores are rows times keys. Where that is much the rows are taken piece by piece, and each piece is
computed again on the way back, so that what is held stays linear in the document.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtptrain.attention_backends.base import ForwardContext, UnrollCache, split_rows
from mtptrain.attention_backends.sdpa.documents import attend_documents

MOST_SCORES = 1 << 22  # queries times keys of a piece, in each head


def attend_unrolled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ctx: ForwardContext,
    cache: UnrollCache,
    scale: float,
    window: int | None,
) -> Tensor:
    if cache.mode == "record":
        key, value = _record(key, value, ctx.query_lens, cache)
        if ctx.keys_only:
            return torch.zeros_like(query)
        lens = (ctx.query_lens, cache.step0_lens)
        return attend_documents(query, key, value, *lens, scale, window)
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
        _in_pieces(q, ok, ov, r, k, v, seen.to(q.device), scale, window)
        for (q, ok, ov, r), (k, v) in zip(mine, step0, strict=True)
        if len(q)
    ]
    return torch.cat(out).flatten(0, 1) if out else torch.zeros_like(query)


def _record(
    key: Tensor, value: Tensor, lens: tuple[int, ...], cache: UnrollCache
) -> tuple[Tensor, Tensor]:
    """Puts the rows of step 0 into the cache, each document's behind those that it has there."""
    if cache.step0 is not None:
        before = [split_rows(x, cache.step0_lens) for x in cache.step0]
        here = [split_rows(x, lens) for x in (key, value)]
        key, value = (
            torch.cat([x for pair in zip(*parts, strict=True) for x in pair])
            for parts in zip(before, here, strict=True)
        )
        lens = tuple(a + b for a, b in zip(cache.step0_lens, lens, strict=True))
    cache.step0, cache.step0_lens = (key, value), lens
    return key, value


def _local_rows(cache: UnrollCache, lens: tuple[int, ...]) -> Tensor:
    """Row index inside its document of each row that goes on."""
    lengths = torch.tensor(lens, device=cache.rows.device)
    start = torch.cumsum(lengths, 0) - lengths
    per_document = torch.tensor(cache.rows_per_document, device=cache.rows.device)
    return cache.rows - torch.repeat_interleave(start, per_document)


def _in_pieces(
    query: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """`_own_and_step0`, over as many rows at a time as may be held; keys behind a piece's last row are left out."""
    most = max(1, MOST_SCORES // (query.shape[1] * len(key)))
    if len(rows) <= most:
        return _own_and_step0(query, own_k, own_v, rows, key, value, seen, scale, window)
    out = []
    for q, ok, ov, r in zip(*(x.split(most) for x in (query, own_k, own_v, rows)), strict=True):
        end = int(r[-1]) + 1
        piece = (q, ok, ov, r, key[:end], value[:end], seen, scale, window)
        out.append(checkpoint(_own_and_step0, *piece, use_reentrant=False))
    return torch.cat(out)


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
