"""Runs a loss over all rows: chunks, the frozen head's GEMMs, weights, sums.

A vocabulary loss compares two softmaxes over V tokens. Kept whole, with autograd's copies, they
would be by far the largest tensors of training. So a chunk of rows goes through the head, the
closed-form gradient overwrites its logits block by block (a block's few copies stay in cache), goes
back through the head at once, and only [R, H] a term remains for `backward` to scale. What a loss makes
of its terms' values, one number a row, is plain autograd. Rows without weight never reach the head;
neighbours held against the same target row (unrolled steps) share its GEMM and softmax, as do losses
that are added up. A draft may have a trained head of its own: what a row counts for is known only
behind the last one, so its gradient is summed by walking the chunks once more on the way back.
Given up: second derivatives, gradients to the frozen head or the target, and, with a trimmed
vocabulary, the target's mass outside it: p is renormalised over the head's rows, which flatters
`acceptance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtptrain.losses.base import Block, FeatureLoss, Loss, LossSums, Rows, Term, VocabLoss

# Elements of a block: a thread's share stays in cache on CPU; elsewhere, launches stay cheap.
_BLOCK_ELEMENTS_PER_THREAD, _BLOCK_ELEMENTS = 2**19, 2**26


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
) -> LossSums:
    """Weighted sums of a loss, differentiable in `draft_states` and `draft_head` only.

    draft_states [R, H] are held against target_states [R, H], or against rows `target_rows` [R] of
    target_states [T, H]. labels [R] are draft-vocabulary ids, -1 outside it. row_weights [R]: zero
    drops the row unseen. head_weight [Vd, H] is frozen; its dtype is that of the GEMMs whatever
    autocast says, all else is fp32. A chunk holds chunk_rows * Vd logits twice, and once more for each
    term beyond the first. `temperature` divides both logits. `step_rows` are the row counts of unrolled
    steps concatenated along R (their total is R, else ValueError): every sum, and the means that a loss
    asks for, are then per step, [S]. `origins` [R] are equal for the steps of one drafted chain; without
    them every row is a chain of its own. `draft_head` [Vd, H] scores the draft's states in place of
    `head_weight`; where it is trained, `backward` repeats the chunks' work.
    """
    parts = loss.summands()
    vocab = [part for _, part in parts if isinstance(part, VocabLoss)]
    labelled = any(part.needs_labels for part in vocab)
    weights = row_weights * (labels >= 0) if labelled else row_weights
    rows = _lay_out(weights, target_rows, step_rows, origins)
    head = _Head.of(head_weight, draft_head, temperature)
    work = _Work(vocab, head, rows, draft_states.detach(), target_states, labels, chunk_rows)
    with torch.autocast(draft_states.device.type, enabled=False):
        found = _walk(work, draft_states.requires_grad)
        values = _ClosedForm.apply(draft_states, draft_head, found.losses, found.grads, work)
        losses = _add_up(parts, values, rows, draft_states, target_states)
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
            total = total + weight * part.rows(draft_states[rows.kept], target)
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


@dataclass(frozen=True)
class _Head:
    """The frozen head, and what scores the draft's states; what they give is in the former's dtype."""

    weight: Tensor  # [Vd, H]
    draft_weight: Tensor  # [Vd, H], `weight` itself unless the draft has a head of its own
    temperature: float

    @classmethod
    def of(cls, weight: Tensor, draft_head: Tensor | None, temperature: float) -> _Head:
        own = weight if draft_head is None else draft_head
        return cls(weight.detach(), own.detach().to(weight.dtype), temperature)

    def logits(self, weight: Tensor, states: Tensor, buffer: Tensor) -> Tensor:
        """[C, H] to the first C rows of `buffer` [>= C, Vd]; the temperature comes in `softmax`."""
        return torch.mm(states.to(weight.dtype), weight.T, out=buffer[: len(states)])

    def softmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax and its logarithm, fp32, one exp for both; may overwrite the logits."""
        logits = logits.float()
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        probs = logits.softmax(-1)
        peak = probs.amax(-1, keepdim=True).log_()  # from the peak, for probs may underflow to 0
        return probs, logits.sub_(logits.amax(-1, keepdim=True)).add_(peak)


@dataclass(frozen=True)
class _Found:
    """What N terms gave on K kept rows, before weights and mixing; fp32."""

    losses: Tensor  # [N, K]
    grads: Tensor  # [N, K, H] d loss / d draft states; [N, K, 0] where those need none
    acceptance: Tensor  # [K]
    agreement: Tensor  # [K]

    def at(self, part: slice) -> _Found:
        """Views of some of the rows, to be filled."""
        rowwise = (self.acceptance[part], self.agreement[part])
        return _Found(self.losses[:, part], self.grads[:, part], *rowwise)


def _block_rows(head_weight: Tensor) -> int:
    on_cpu = head_weight.device.type == "cpu"
    limit = _BLOCK_ELEMENTS_PER_THREAD * torch.get_num_threads() if on_cpu else _BLOCK_ELEMENTS
    return max(1, limit // len(head_weight))


def _slices(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


@dataclass(frozen=True)
class _Work:
    """Rows to compare, and by what."""

    losses: Sequence[VocabLoss]
    head: _Head
    rows: Rows
    draft_states: Tensor  # [R, H]
    target_states: Tensor  # [T, H]
    labels: Tensor  # [R]
    chunk_rows: int

    def nothing_found(self, width: int) -> _Found:
        """Zeros, to be filled; `width` is H, or 0 where nobody asks for the states' gradients."""
        terms, kept = sum(loss.num_terms for loss in self.losses), len(self.rows.kept)
        shapes = (terms, kept), (terms, kept, width), (kept,), (kept,)
        return _Found(*(self.rows.share.new_zeros(shape) for shape in shapes))


@torch.no_grad()
def _walk(work: _Work, needs_grads: bool) -> _Found:
    """All kept rows; the head stays unused without losses."""
    found = work.nothing_found(work.head.weight.shape[1] if needs_grads else 0)
    for part, grad_logits in _chunks(work, found):
        for grads, of_term in zip(found.at(part).grads, grad_logits, strict=True):
            grads.copy_(of_term @ work.head.draft_weight[:, : grads.shape[1]])
    if work.head.temperature != 1.0:
        found.grads.div_(work.head.temperature)
    return found


@torch.no_grad()
def _own_head_grad(work: _Work, factors: Tensor) -> Tensor:
    """Gradient of the draft's own head, [Vd, H] fp32, where value [n, k] counts `factors` [N, K]."""
    total = torch.zeros_like(work.head.draft_weight, dtype=torch.float32)
    for part, grad_logits in _chunks(work, work.nothing_found(0)):
        states = work.draft_states[work.rows.kept[part]]
        for factor, of_term in zip(factors[:, part], grad_logits, strict=True):
            total += of_term.T @ (factor.unsqueeze(1) * states).to(of_term.dtype)
    return total.div_(work.head.temperature)


def _chunks(work: _Work, found: _Found) -> Iterator[tuple[slice, Tensor]]:
    """Each chunk of the kept rows and the gradients of its terms in the draft's logits, [N, C, Vd], before the
    temperature; fills in the rows' values. Buffers are allocated once: a chunk is gone when the next comes."""
    rows, head = work.rows, work.head
    terms, kept = found.losses.shape
    high = min(work.chunk_rows, kept) if terms else 0
    target_buffer = head.weight.new_empty(high, len(head.weight))
    term_buffers = head.weight.new_empty(terms, high, len(head.weight))
    for part in _slices(kept if terms else 0, work.chunk_rows):
        index = rows.kept[part]
        once, back = rows.targets[part].unique_consecutive(return_inverse=True)
        head.logits(head.weight, work.target_states[once], target_buffer)
        head.logits(head.draft_weight, work.draft_states[index], term_buffers[0])
        buffers = term_buffers[:, : len(index)]
        _chunk(work, target_buffer, back, work.labels[index], buffers, found.at(part))
        yield part, buffers


def _chunk(
    work: _Work,
    target_logits: Tensor,
    back: Tensor,
    labels: Tensor,
    term_buffers: Tensor,
    found: _Found,
) -> None:
    """Draft logits, in the first of `term_buffers` [N, C, Vd], become the gradients of all terms.

    back [C] are rows of target_logits.
    """
    for cut in _slices(len(back), _block_rows(work.head.weight)):
        block = _compare(work.head, target_logits, back[cut], term_buffers[0, cut], labels[cut])
        terms = [term for loss in work.losses for term in loss.terms(block)]
        _fill(terms, block, term_buffers[:, cut], found.at(cut))


def _compare(
    head: _Head, target_logits: Tensor, back: Tensor, draft_logits: Tensor, labels: Tensor
) -> Block:
    """Both softmaxes, that of a target row once however many draft rows are held against it."""
    once, again = back.unique_consecutive(return_inverse=True)
    p, log_p = head.softmax(target_logits[once])
    entropy, top = -(p * log_p).sum(-1)[again], log_p.argmax(-1, keepdim=True)[again]
    p = p if len(once) == len(back) else p[again]
    q, log_q = head.softmax(draft_logits)
    acceptance = torch.minimum(p, q).sum(-1)
    agreement = (log_q.gather(1, top).squeeze(1) == log_q.amax(-1)).float()
    return Block(q, p, log_q, q - p, entropy, acceptance, agreement, labels, log_p, again)


def _fill(terms: Sequence[Term], block: Block, term_buffers: Tensor, found: _Found) -> None:
    """Keeps a block's results; only now, for its log_q may lie in the first of the buffers."""
    found.acceptance.copy_(block.acceptance)
    found.agreement.copy_(block.agreement)
    for losses, grads, term in zip(found.losses, term_buffers, terms, strict=True):
        losses.copy_(term.loss)
        grads.copy_(term.grad)


class _ClosedForm(torch.autograd.Function):
    """Hangs the gradients of states and of the draft's own head onto the terms' values [N, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        draft_states: Tensor,
        draft_head: Tensor | None,
        losses: Tensor,
        grads: Tensor,
        work: _Work,
    ) -> Tensor:
        ctx.save_for_backward(grads)
        ctx.work = work
        ctx.dtypes = draft_states.dtype, None if draft_head is None else draft_head.dtype
        return losses.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride], the decorator hides names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (factors,), (grads,), work = grad_outputs, ctx.saved_tensors, ctx.work
        to_states = to_head = None
        if ctx.needs_input_grad[0]:
            scaled = (grads * factors.unsqueeze(-1)).sum(0).to(ctx.dtypes[0])  # [K, H]
            to_states = scaled.new_zeros(work.draft_states.shape)
            to_states.index_copy_(0, work.rows.kept, scaled)
        if ctx.needs_input_grad[1]:
            to_head = _own_head_grad(work, factors).to(ctx.dtypes[1])
        return to_states, to_head, None, None, None
