"""What every loss shares: row chunks, the frozen head's GEMMs, weights, sums.

A vocabulary loss compares two softmaxes over V tokens. Kept whole, with autograd's copies, they
would be by far the largest tensors of training. So a chunk of rows goes through the head, the
closed-form gradient overwrites its logits block by block (a block's few copies stay in cache), goes
back through the head at once, and only [R, H] a term remains for `backward` to scale. What a loss makes
of its terms' values, one number a row, is plain autograd. Rows without weight never reach the head;
neighbours held against the same target row (unrolled steps) share its GEMM and softmax, as do losses
that are added up. Given up: second derivatives, gradients to head or target, and, with a trimmed
vocabulary, the target's mass outside it: p is renormalised over the head's rows, which flatters
`acceptance`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

# Elements of a block: a thread's share stays in cache on CPU; elsewhere, launches stay cheap.
_BLOCK_ELEMENTS_PER_THREAD, _BLOCK_ELEMENTS = 2**19, 2**26


@dataclass(frozen=True)
class Block:
    """Both distributions of C rows over the draft vocabulary, fp32. Read-only: terms share it."""

    q: Tensor  # [C, Vd] draft
    p: Tensor  # [C, Vd] target
    log_q: Tensor  # [C, Vd]
    gap: Tensor  # [C, Vd] q - p
    entropy: Tensor  # [C] of p, in nats
    acceptance: Tensor  # [C] sum_x min(p, q) = 1 - TV
    agreement: Tensor  # [C] 1 where both maxima are at one token (to fp32's last bit)
    labels: Tensor  # [C] draft-vocabulary ids, -1 outside it
    log_p_once: Tensor  # [C', Vd] of every target row once
    again: Tensor  # [C] row of `log_p_once`

    @property
    def log_p(self) -> Tensor:
        """[C, Vd], spread over the rows only where a loss asks for it."""
        once = len(self.log_p_once) == len(self.again)
        return self.log_p_once if once else self.log_p_once[self.again]


@dataclass(frozen=True)
class Term:
    """One summand of a loss on a block, with its gradient in closed form."""

    loss: Tensor  # [C]
    grad: Tensor  # [C, Vd] d loss of a row / d draft logits of that row


class Loss(ABC):
    """What the trainer is given: one loss of the shelf, or several added up."""

    @abstractmethod
    def summands(self) -> tuple[tuple[float, VocabLoss | FeatureLoss], ...]:
        """The losses that are added up, with their weights."""


class VocabLoss(Loss):
    """A loss on the draft's distribution. Subclasses are frozen dataclasses of hyperparameters."""

    needs_labels: ClassVar[bool] = False  # True: a row labelled -1 gets weight 0 in every sum
    num_terms: ClassVar[int] = 1

    @abstractmethod
    def terms(self, block: Block) -> tuple[Term, ...]:
        """Value and gradient of every summand on one block, which must not be written into."""

    def mix(self, values: Tensor, rows: Rows) -> Tensor:
        """Loss of every row, [K], from the values [N, K] of its N terms; autograd follows it back to them."""
        return values.sum(0)

    def summands(self) -> tuple[tuple[float, VocabLoss | FeatureLoss], ...]:
        return ((1.0, self),)


class FeatureLoss(Loss):
    """A loss on the draft's states themselves: no vocabulary, plain autograd."""

    @abstractmethod
    def rows(self, draft_states: Tensor, target_states: Tensor) -> Tensor:
        """Loss of every row, fp32: [R, H] and [R, H] to [R]."""

    def summands(self) -> tuple[tuple[float, VocabLoss | FeatureLoss], ...]:
        return ((1.0, self),)


@dataclass(frozen=True)
class Rows:
    """The K rows of non-zero weight, those of one target row next to each other.

    A chain is what one origin drafts: at most one row a step, and none where the draft stopped or where
    the row has no weight.
    """

    kept: Tensor  # [K] index into the caller's R rows
    targets: Tensor  # [K] index into target_states
    steps: Tensor  # [K] unrolled step, below S
    chains: Tensor  # [K] number of the row's chain, below M
    num_chains: int  # M
    share: Tensor  # [S, K] fp32, the weight of each row in each step's sums
    count: Tensor  # [S]

    def sums(self, values: Tensor) -> Tensor:
        """[K] to [S]; elementwise, so that neither autocast nor TF32 rounds a sum."""
        return (self.share * values).sum(1)

    def means(self, values: Tensor) -> Tensor:
        """The weighted mean over each row's step: [K] to [K]."""
        tiny = torch.finfo(torch.float32).tiny
        return (self.sums(values) / self.count.clamp(min=tiny))[self.steps]

    def by_chain(self, values: Tensor, absent: float) -> Tensor:
        """[K] to [S, M], `absent` where a chain has no row."""
        table = values.new_full((len(self.count), self.num_chains), absent)
        return table.index_put((self.steps, self.chains), values)

    def by_row(self, table: Tensor) -> Tensor:
        """[S, M] to [K]: the way back from `by_chain`."""
        return table[self.steps, self.chains]


@dataclass(frozen=True)
class LossSums:
    """Weighted sums over rows, fp32, never means: 0-dim, or [S] where `step_rows` names S steps."""

    loss: Tensor  # the only differentiable one
    count: Tensor  # of the row weights themselves
    acceptance: Tensor  # of sum_x min(p, q); zero where no part looks at the vocabulary
    agreement: Tensor  # of argmax p == argmax q; zero where no part looks at the vocabulary


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
) -> LossSums:
    """Weighted sums of a loss, differentiable in `draft_states` only.

    draft_states [R, H] are held against target_states [R, H], or against rows `target_rows` [R] of
    target_states [T, H]. labels [R] are draft-vocabulary ids, -1 outside it. row_weights [R]: zero
    drops the row unseen. head_weight [Vd, H] is frozen; its dtype is that of the GEMMs whatever
    autocast says, all else is fp32. A chunk holds chunk_rows * Vd logits twice, and once more for each
    term beyond the first. `temperature` divides both logits. `step_rows` are the row counts of unrolled
    steps concatenated along R (their total is R, else ValueError): every sum, and the means that a loss
    asks for, are then per step, [S]. `origins` [R] are equal for the steps of one drafted chain; without
    them every row is a chain of its own.
    """
    parts = loss.summands()
    vocab = [part for _, part in parts if isinstance(part, VocabLoss)]
    labelled = any(part.needs_labels for part in vocab)
    weights = row_weights * (labels >= 0) if labelled else row_weights
    rows = _lay_out(weights, target_rows, step_rows, origins)
    head = _Head(head_weight.detach(), temperature)
    with torch.autocast(draft_states.device.type, enabled=False):
        found = _walk(vocab, head, rows, draft_states, target_states, labels, chunk_rows)
        values = _ClosedForm.apply(draft_states, found.losses, found.grads, rows.kept)
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
    """The frozen head; what it gives is in its own dtype."""

    weight: Tensor  # [Vd, H]
    temperature: float

    def logits(self, states: Tensor, buffer: Tensor) -> Tensor:
        """[C, H] to the first C rows of `buffer` [>= C, Vd]; the temperature comes in `softmax`."""
        return torch.mm(states.to(self.weight.dtype), self.weight.T, out=buffer[: len(states)])

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


@torch.no_grad()
def _walk(
    losses: Sequence[VocabLoss],
    head: _Head,
    rows: Rows,
    draft_states: Tensor,
    target_states: Tensor,
    labels: Tensor,
    chunk_rows: int,
) -> _Found:
    """All kept rows, chunk by chunk, in buffers allocated once; the head stays unused without losses."""
    terms, kept = sum(loss.num_terms for loss in losses), len(rows.kept)
    (vocab, width), high = head.weight.shape, min(chunk_rows, kept)
    width = width if draft_states.requires_grad else 0
    shapes = (terms, kept), (terms, kept, width), (kept,), (kept,)
    found = _Found(*(rows.share.new_zeros(shape) for shape in shapes))
    if not losses:
        return found
    target_buffer = head.weight.new_empty(high, vocab)
    term_buffers = head.weight.new_empty(terms, high, vocab)
    for part in _slices(kept, chunk_rows):
        index = rows.kept[part]
        once, back = rows.targets[part].unique_consecutive(return_inverse=True)
        head.logits(target_states[once], target_buffer)
        head.logits(draft_states[index], term_buffers[0])
        _chunk(losses, head, target_buffer, back, labels[index], term_buffers, found.at(part))
    return found


def _chunk(
    losses: Sequence[VocabLoss],
    head: _Head,
    target_logits: Tensor,
    back: Tensor,
    labels: Tensor,
    term_buffers: Tensor,
    found: _Found,
) -> None:
    """Draft logits, in the first of `term_buffers` [N, C, Vd], become the gradients of all terms.

    back [C] are rows of target_logits.
    """
    for cut in _slices(len(back), _block_rows(head.weight)):
        block = _compare(head, target_logits, back[cut], term_buffers[0, cut], labels[cut])
        terms = [term for loss in losses for term in loss.terms(block)]
        _fill(terms, block, term_buffers[:, cut], found.at(cut))
    for grad_states, grad_logits in zip(found.grads, term_buffers, strict=True):
        grad_states.copy_(grad_logits[: len(back)] @ head.weight[:, : grad_states.shape[1]])
    if head.temperature != 1.0:
        found.grads.div_(head.temperature)


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
    """Hangs gradients already computed in the forward onto the terms' values [N, K]."""

    @staticmethod
    def forward(
        ctx: Any, draft_states: Tensor, losses: Tensor, grads: Tensor, kept: Tensor
    ) -> Tensor:
        ctx.save_for_backward(grads, kept)
        ctx.states = draft_states.shape, draft_states.dtype
        return losses.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride], the decorator hides names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grads, kept = ctx.saved_tensors
        shape, dtype = ctx.states
        scaled = (grads * grad_outputs[0].unsqueeze(-1)).sum(0).to(dtype)  # [K, H]
        return scaled.new_zeros(shape).index_copy_(0, kept, scaled), None, None, None
