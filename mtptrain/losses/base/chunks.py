"""Runs a loss over all rows: chunks, the frozen head's GEMMs, weights, sums.

A vocabulary loss compares two softmaxes over V tokens. Kept whole, with autograd's copies, they
would be by far the largest tensors of training. So a chunk of rows goes through the head, the
closed-form gradient overwrites its logits block by block (a block's few copies stay in cache), goes
back through the head at once, and only [R, W] a term remains for `backward` to scale. What a loss makes
of its terms' values, one number a row, is plain autograd. Rows without weight never reach the head;
neighbours held against the same target row (unrolled steps) share its GEMM and softmax, as do losses
that are added up. A draft may have a trained head of its own, or trained columns beside the frozen one:
what a row counts for is known only behind the last one, so their gradient is summed by walking the chunks
once more on the way back.
Given up: second derivatives, gradients to the frozen head or the target, and, with a trimmed
vocabulary, the target's mass outside it: p is renormalised over the head's rows, which flatters
`acceptance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtptrain.losses.base.formula import FeatureLoss, Loss, VocabLoss
from mtptrain.losses.base.rows import LossSums, Rows
from mtptrain.losses.base.walk import TwoHeads, Work, own_head_grad, walk


def compute(
    loss: Loss,
    draft_states: Tensor,
    target_states: Tensor,
    labels: Tensor,
    row_weights: Tensor,
    head_weight: Tensor,
    *,
    target_rows: Tensor | None = None,
    step_rows: Sequence[int] | None = None,
    origins: Tensor | None = None,
    chunk_rows: int = 512,
    temperature: float = 1.0,
    draft_head: Tensor | None = None,
    beside: Tensor | None = None,
    confidence: Tensor | None = None,
    stands_for: Tensor | None = None,
) -> LossSums:
    """Weighted sums of a loss, differentiable in `draft_states`, `draft_head`, `beside` and `confidence` only.

    draft_states [R, W] are held against target_states [R, H], or against rows `target_rows` [R] of
    target_states [T, H]. labels [R] are draft-vocabulary ids, -1 outside it. row_weights [R]: zero
    drops the row unseen. head_weight [Vd, H] is frozen; its dtype is that of the GEMMs whatever
    autocast says, all else is fp32. A chunk holds chunk_rows * Vd logits twice, and once more for each
    term beyond the first; on a CPU it is smaller where that would be much. `temperature` divides both
    logits. `step_rows` are the row counts of unrolled steps concatenated along R (their total is R, else
    ValueError): every sum, and the means that a loss asks for, are then per step, [S]. `origins` [R] are equal
    for the steps of one drafted chain; without them every row is a chain of its own. `draft_head` [Vd, Hd]
    scores the draft's states in place of
    `head_weight`, and `beside` [Vd, r] what states of W = Hd + r hold beyond their first Hd entries; where either
    is trained, `backward` repeats the chunks' work. `confidence` [R] are logits of the draft's own guess of its
    acceptance, for losses that ask for it. `stands_for` [Vd]: where the head's rows are a sample of a larger
    vocabulary, how many of its tokens each is drawn for; `acceptance`, which the confidence is held against, is
    then an estimate of that over all of them.
    """
    parts = loss.summands()
    vocab = [part for _, part in parts if isinstance(part, VocabLoss)]
    labelled = any(part.needs_labels for part in vocab)
    weights = row_weights * (labels >= 0) if labelled else row_weights
    rows = _lay_out(weights, target_rows, step_rows, origins)
    head = TwoHeads.of(head_weight, draft_head, beside, temperature)
    work = Work(
        vocab, head, rows, draft_states.detach(), target_states, labels, chunk_rows, stands_for
    )
    with torch.autocast(draft_states.device.type, enabled=False):
        found = walk(work, draft_states.requires_grad)
        own = (draft_states, draft_head, beside)
        values = _ClosedForm.apply(*own, found.losses, found.grads, work)
        sure = None if confidence is None else confidence[rows.kept].float()
        seen = replace(rows, confidence=sure, acceptance=found.acceptance)
        losses = _add_up(parts, values, seen, draft_states, target_states)
        sums = [rows.sums(x) for x in (losses, found.acceptance, found.agreement)]
    total, accepted, agreed = sums
    tensors = (total, rows.count, accepted, agreed)
    return LossSums(*(x.squeeze(0) if step_rows is None else x for x in tensors))


def _add_up(
    parts: Sequence[tuple[float, VocabLoss | FeatureLoss]],
    values: Tensor,
    rows: Rows,
    draft_states: Tensor,
    target_states: Tensor,
) -> Tensor:
    """Loss of every row, [K]; `values` [N, K] are those of all vocabulary terms, part after part."""
    total = torch.zeros_like(values[0]) if len(values) else rows.share.new_zeros(len(rows.kept))
    for weight, part in parts:
        if isinstance(part, VocabLoss):
            own, values = values.tensor_split([part.num_terms])
            total = total + weight * part.mix(own, rows)
        else:
            target = target_states[rows.targets].detach()
            states = draft_states[rows.kept, : target.shape[1]]
            total = total + weight * part.rows(states, target)
    return total


def _lay_out(
    weights: Tensor,
    target_rows: Tensor | None,
    step_rows: Sequence[int] | None,
    origins: Tensor | None,
) -> Rows:
    if step_rows is not None and sum(step_rows) != len(weights):
        raise ValueError(f"step_rows {tuple(step_rows)} must add up to {len(weights)} rows")
    kept = weights.detach().nonzero().squeeze(1)
    if target_rows is not None:
        kept = kept[target_rows[kept].argsort(stable=True)]
    sizes = torch.tensor([len(weights)] if step_rows is None else step_rows, device=weights.device)
    numbers = torch.arange(len(sizes), device=weights.device)
    steps = numbers.repeat_interleave(sizes, output_size=len(weights))[kept]
    share = weights.detach()[kept].float() * (steps == numbers.unsqueeze(1))
    targets = kept if target_rows is None else target_rows[kept]
    once, chains = (kept if origins is None else origins[kept]).unique(return_inverse=True)
    return Rows(kept, targets, steps, chains, len(once), share, share.sum(1))


class _ClosedForm(torch.autograd.Function):
    """Hangs the gradients of states and of what scores them onto the terms' values [N, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        draft_states: Tensor,
        draft_head: Tensor | None,
        beside: Tensor | None,
        losses: Tensor,
        grads: Tensor,
        work: Work,
    ) -> Tensor:
        ctx.save_for_backward(grads)
        ctx.work = work
        ctx.dtypes = [None if x is None else x.dtype for x in (draft_states, draft_head, beside)]
        return losses.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride], the decorator hides names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (factors,), (grads,), work = grad_outputs, ctx.saved_tensors, ctx.work
        to_states = to_head = to_beside = None
        hidden = work.head.draft_weight.shape[1]
        if ctx.needs_input_grad[0]:
            scaled = (grads * factors.unsqueeze(-1)).sum(0).to(ctx.dtypes[0])  # [K, W]
            to_states = scaled.new_zeros(work.draft_states.shape)
            to_states.index_copy_(0, work.rows.kept, scaled)
        if ctx.needs_input_grad[1]:
            to_head = own_head_grad(work, factors, slice(0, hidden)).to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            to_beside = own_head_grad(work, factors, slice(hidden, None)).to(ctx.dtypes[2])
        return to_states, to_head, to_beside, None, None, None
