"""Which rows a head learns from at each unrolled step: exactly those that a server would run (design §5.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.types import DraftBatch


@dataclass(frozen=True, eq=False)
class UnrollStep:
    """Supervised rows of one unrolled step."""

    states: Tensor  # [R, W] what the rows of `head_rows` score
    target_rows: Tensor  # [R] packed index of the token whose final feature is the target's state
    label_rows: Tensor  # [R] packed index of the predicted token
    confidence: Tensor | None = None  # [R] logit of the draft's own guess of each row's acceptance


def answer_chain(batch: DraftBatch, steps: int, supervised: Tensor) -> Tensor:
    """`supervised_chain` of the first step; later ones are for answer rows alone, [steps, T] bool. No row drafts
    more tokens than the batch's `depths` say."""
    chain = supervised_chain(supervised, batch.cu_seqlens, steps)
    chain[1:] &= supervised_chain(batch.loss_mask, batch.cu_seqlens, steps)[1:]
    if batch.depths is not None:
        chain &= batch.depths > torch.arange(steps, device=chain.device)[:, None]
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


def rows_from_first(supervised: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Which rows stand at or behind the first supervised one of their document, [T] bool; all of the batch, where
    it has none."""
    before = torch.cat([supervised.new_zeros(1, dtype=torch.long), supervised.cumsum(0)])
    document = torch.repeat_interleave(torch.diff(cu_seqlens))
    run = before[1:] > before[cu_seqlens[:-1]][document]
    return run if bool(run.any()) else ~run


def tokens_ahead(input_ids: Tensor, offset: int) -> Tensor:
    """Token t + offset for each packed row; the last rows, never supervised, read token 0."""
    return torch.cat([input_ids[offset:], input_ids.new_zeros(min(offset, len(input_ids)))])


def per_document(rows: Tensor, cu_seqlens: Tensor) -> tuple[int, ...]:
    """How many of the ascending packed `rows` lie in each document."""
    return tuple(torch.diff(torch.searchsorted(rows, cu_seqlens)).tolist())
