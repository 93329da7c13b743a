"""Token trees of many rows: the prefix without a mask, the newest rows with theirs; see the package's opening.

Of each sequence one fused call covers the keys below the tree, which every row sees, and a product over the tree's
own few keys meets the mask; both are joined by the log-sum-exp of their scores. So a mask costs the same at any
length of context. A sliding window hides keys of the prefix as well: such a layer masks all keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtptrain.attention_backends.base import ForwardContext, PagedBatch, split_rows
from mtptrain.attention_backends.sdpa.documents import gather, grouped_sdpa


def attend_trees(
    query: Tensor,  # [T, N, d]
    ctx: ForwardContext,
    paged: PagedBatch,
    tails: tuple[Tensor, ...],
    layer: int,
    scale: float,
    window: int | None,
) -> Tensor:
    out = []
    for q, table, kv_len, tail in zip(
        split_rows(query, ctx.query_lens), paged.page_tables, paged.kv_lens, tails, strict=True
    ):
        k, v = (gather(x[layer], table, kv_len) for x in (paged.keys, paged.values))
        seen = tail.to(q.device)
        if window is None:
            out.append(_prefix_and_tail(q, k, v, seen, scale))
        else:
            out.append(grouped_sdpa(q, k, v, scale, _windowed(kv_len, seen, window)))
    return torch.cat(out)


def _prefix_and_tail(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float
) -> Tensor:
    """query [Q, N, d], key and value [heads, kv_len, d], `seen` [Q, newest rows]."""
    heads, num_keys, dim = key.shape
    first = num_keys - seen.shape[1]
    q = query.view(len(query), heads, -1, dim).permute(1, 2, 0, 3)  # [heads, G, Q, d]
    k, v = (x[:, None] for x in (key, value))
    out, own = _masked(q, k[:, :, first:], v[:, :, first:], seen, scale)
    if first:
        past, theirs = _unmasked(q, k[:, :, :first], v[:, :, :first], scale)
        out = torch.lerp(out, past, torch.sigmoid(theirs - own)[..., None].to(out.dtype))
    return out.permute(2, 0, 1, 3).reshape(query.shape)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """What each query [heads, G, Q, d] attends to, and the log-sum-exp [heads, G, Q] of its scores."""
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    total = scores.logsumexp(-1)
    return torch.exp(scores - total[..., None]).to(value.dtype) @ value, total


def _unmasked(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same over keys [heads, 1, n, d] that every query sees, on a CPU in one fused call."""
    if query.device.type != "cpu":
        return _masked(query, key, value, None, scale)
    k, v = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    # the kernel of scaled_dot_product_attention itself, which does not hand on the log-sum-exp
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, k, v, scale=scale)


def _windowed(kv_len: int, seen: Tensor, window: int) -> Tensor:
    """[Q, kv_len] bool: a query sees the newest `window` keys of those that it would see."""
    first = kv_len - seen.shape[1]
    whole = torch.cat([seen.new_ones(len(seen), first), seen], 1)
    newer = whole.flip(1).cumsum(1).flip(1)  # seen keys from this one on
    return whole & (newer <= window)
