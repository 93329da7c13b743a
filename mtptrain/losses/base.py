"""What every loss shares: row chunks, the frozen head's GEMMs, weights, sums.

A vocabulary loss compares two softmaxes over V tokens. Kept whole, with autograd's copies, they
would be by far the largest tensors of training. So a chunk of rows goes through the head, the
closed-form gradient overwrites its logits block by block (a block's few copies stay in cache), goes
back through the head at once, and only [R, H] remains for `backward` to scale. Rows without weight
never reach the head; neighbours held against the same target row (unrolled steps) share its GEMM
and softmax. A draft may have a trained head of its own: its gradient is summed on the way, per term
and step, for the factors of both are known only at the end. Given up: second derivatives, gradients
to the frozen head or the target, and, with a trimmed vocabulary, the target's mass outside it: p is
renormalised over the head's rows, which flatters `acceptance`.
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


@dataclass(frozen=True)
class Term:
    """One summand of a loss on a block, with its gradient in closed form."""

    loss: Tensor  # [C]
    grad: Tensor  # [C, Vd] d loss of a row / d draft logits of that row


class VocabLoss(ABC):
    """A loss on the draft's distribution. Subclasses are frozen dataclasses of hyperparameters."""

    needs_labels: ClassVar[bool] = False  # True: a row labelled -1 gets weight 0 in every sum

    @abstractmethod
    def terms(self, block: Block) -> tuple[Term, ...]:
        """Value and gradient of every summand on one block, which must not be written into."""

    def mix(self, mean_acceptance: Tensor) -> tuple[Tensor, ...]:
        """Constant factor of every term, each [S], given the mean acceptance [S] of each step."""
        return (torch.ones_like(mean_acceptance),)


class FeatureLoss(ABC):
    """A loss on the draft's states themselves: no vocabulary, plain autograd."""

    @abstractmethod
    def rows(self, draft_states: Tensor, target_states: Tensor) -> Tensor:
        """Loss of every row, fp32: [R, H] and [R, H] to [R]."""


@dataclass(frozen=True)
class LossSums:
    """Weighted sums over rows, fp32, never means: 0-dim, or [S] where `step_rows` names S steps."""

    loss: Tensor  # the only differentiable one
    count: Tensor  # of the row weights themselves
    acceptance: Tensor  # of sum_x min(p, q); zero for a feature loss
    agreement: Tensor  # of argmax p == argmax q; zero for a feature loss


def compute(
    loss: VocabLoss | FeatureLoss,
    draft_states: Tensor,
    target_states: Tensor,
    labels: Tensor,
    row_weights: Tensor,
    head_weight: Tensor,
    *,
    target_rows: Tensor | None = None,
    step_rows: Sequence[int] | None = None,
    chunk_rows: int = 512,
    temperature: float = 1.0,
    draft_head: Tensor | None = None,
) -> LossSums:
    """`head_loss` or `feature_loss`, by the class of the loss; arguments as there."""
    layout = (target_rows, step_rows)
    if isinstance(loss, FeatureLoss):
        return feature_loss(loss, draft_states, target_states, row_weights, *layout)
    head = (head_weight, chunk_rows, temperature)
    states = (draft_states, target_states)
    return head_loss(loss, *states, labels, row_weights, *head, *layout, draft_head)


def head_loss(
    loss: VocabLoss,
    draft_states: Tensor,
    target_states: Tensor,
    labels: Tensor,
    row_weights: Tensor,
    head_weight: Tensor,
    chunk_rows: int = 512,
    temperature: float = 1.0,
    target_rows: Tensor | None = None,
    step_rows: Sequence[int] | None = None,
    draft_head: Tensor | None = None,
) -> LossSums:
    """Weighted sums of a vocabulary loss, differentiable in `draft_states` and `draft_head` only.

    draft_states [R, H] are held against target_states [R, H], or against rows `target_rows` [R] of
    target_states [T, H]. labels [R] are draft-vocabulary ids, -1 outside it. row_weights [R]: zero
    drops the row unseen. head_weight [Vd, H] is frozen; its dtype is that of the GEMMs whatever
    autocast says, all else is fp32. A chunk holds chunk_rows * Vd logits twice. `temperature`
    divides both logits. `step_rows` are the row counts of unrolled steps concatenated along R
    (their total is R, else ValueError): every sum, and the acceptance that `mix` sees, is then per
    step, [S]. `draft_head` [Vd, H] scores the draft's states in place of `head_weight`; training it
    holds its gradient for every term and step, [N, S, Vd, H] fp32.
    """
    weights = row_weights * (labels >= 0) if loss.needs_labels else row_weights
    rows = _lay_out(weights, target_rows, step_rows)
    head = _Head.of(head_weight, draft_head, temperature)
    with torch.no_grad(), torch.autocast(draft_states.device.type, enabled=False):
        found = _walk(loss, head, rows, draft_states, target_states, labels, chunk_rows)
        accepted, agreed = rows.sums(found.acceptance), rows.sums(found.agreement)
        mixed = _factors(loss, accepted, rows.count)  # [N, S]
        factors = mixed[:, rows.steps]  # [N, K]
        total = rows.sums((factors * found.losses).sum(0))
        scale = factors * rows.weights / temperature  # [N, K]
        grad = (found.grads * scale.unsqueeze(-1)).sum(0)  # [K, H]
    total = _ClosedForm.apply(draft_states, total, grad, rows.kept, rows.steps)
    if found.head_grads is not None:
        total = _OwnHead.apply(total, draft_head, mixed / temperature, found.head_grads)
    return _as_sums(step_rows, total, rows.count, accepted, agreed)


def feature_loss(
    loss: FeatureLoss,
    draft_states: Tensor,
    target_states: Tensor,
    row_weights: Tensor,
    target_rows: Tensor | None = None,
    step_rows: Sequence[int] | None = None,
) -> LossSums:
    """Weighted sums of a feature loss; arguments as in `head_loss`, but no head and no chunks."""
    rows = _lay_out(row_weights, target_rows, step_rows)
    total = rows.sums(loss.rows(draft_states[rows.kept], target_states[rows.targets].detach()))
    nothing = torch.zeros_like(rows.count)
    return _as_sums(step_rows, total, rows.count, nothing, nothing)


def _as_sums(step_rows: Sequence[int] | None, *sums: Tensor) -> LossSums:
    return LossSums(*(x.squeeze(0) if step_rows is None else x for x in sums))


@dataclass(frozen=True)
class _Rows:
    """The K rows of non-zero weight, those of one target row next to each other."""

    kept: Tensor  # [K] index into the caller's R rows
    targets: Tensor  # [K] index into target_states
    steps: Tensor  # [K] unrolled step, below S
    weights: Tensor  # [K] fp32
    share: Tensor  # [S, K] the weight of each row in each step's sums
    count: Tensor  # [S]

    def sums(self, values: Tensor) -> Tensor:
        """[K] to [S]; elementwise, so that neither autocast nor TF32 rounds a sum."""
        return (self.share * values).sum(1)


def _lay_out(weights: Tensor, target_rows: Tensor | None, step_rows: Sequence[int] | None) -> _Rows:
    if step_rows is not None and sum(step_rows) != len(weights):
        raise ValueError(f"step_rows {tuple(step_rows)} must add up to {len(weights)} rows")
    kept = weights.detach().nonzero().squeeze(1)
    if target_rows is not None:
        kept = kept[target_rows[kept].argsort(stable=True)]
    sizes = torch.tensor([len(weights)] if step_rows is None else step_rows, device=weights.device)
    numbers = torch.arange(len(sizes), device=weights.device)
    steps = numbers.repeat_interleave(sizes, output_size=len(weights))[kept]
    kept_weights = weights.detach()[kept].float()
    share = kept_weights * (steps == numbers.unsqueeze(1))
    targets = kept if target_rows is None else target_rows[kept]
    return _Rows(kept, targets, steps, kept_weights, share, share.sum(1))


def _factors(loss: VocabLoss, accepted: Tensor, count: Tensor) -> Tensor:
    """The terms' factors [N, S]; the mean acceptance of a step without rows is 0."""
    return torch.stack(loss.mix(accepted / count.clamp(min=torch.finfo(torch.float32).tiny)))


@dataclass(frozen=True)
class _Head:
    """The frozen head, and what scores the draft's states; what they give is in the former's dtype."""

    weight: Tensor  # [Vd, H]
    draft_weight: Tensor  # [Vd, H], `weight` itself unless the draft has a head of its own
    temperature: float
    is_trained: bool  # the draft's own

    @classmethod
    def of(cls, weight: Tensor, draft_head: Tensor | None, temperature: float) -> _Head:
        own = weight if draft_head is None else draft_head
        is_trained = draft_head is not None and draft_head.requires_grad and torch.is_grad_enabled()
        return cls(weight.detach(), own.detach().to(weight.dtype), temperature, is_trained)

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
    head_grads: Tensor | None = None  # [N, S, Vd, H] weighted sums over the rows of a step

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


def _walk(
    loss: VocabLoss,
    head: _Head,
    rows: _Rows,
    draft_states: Tensor,
    target_states: Tensor,
    labels: Tensor,
    chunk_rows: int,
) -> _Found:
    """All kept rows, chunk by chunk, in buffers allocated once."""
    terms, kept = len(_factors(loss, rows.count, rows.count)), len(rows.kept)
    (vocab, width), high = head.weight.shape, min(chunk_rows, kept)
    width = width if draft_states.requires_grad else 0
    shapes = (terms, kept), (terms, kept, width), (kept,), (kept,)
    head_grads = (terms, len(rows.count), vocab, head.weight.shape[1])
    of_head = rows.weights.new_zeros(head_grads) if head.is_trained else None
    found = _Found(*(rows.weights.new_zeros(shape) for shape in shapes), head_grads=of_head)
    target_buffer = head.weight.new_empty(high, vocab)
    term_buffers = head.weight.new_empty(terms, high, vocab)
    for part in _slices(kept, chunk_rows):
        index = rows.kept[part]
        once, back = rows.targets[part].unique_consecutive(return_inverse=True)
        head.logits(head.weight, target_states[once], target_buffer)
        head.logits(head.draft_weight, draft_states[index], term_buffers[0])
        _chunk(loss, head, target_buffer, back, labels[index], term_buffers, found.at(part))
        if of_head is not None:
            weighted = draft_states[index] * rows.weights[part].unsqueeze(1)
            _add_head_grads(of_head, term_buffers, weighted, rows.steps[part])
    return found


def _add_head_grads(sums: Tensor, grad_logits: Tensor, states: Tensor, steps: Tensor) -> None:
    """Adds a chunk's part: sums [N, S, Vd, H], grad_logits [N, >= C, Vd], weighted states [C, H], steps [C]."""
    states = states.to(grad_logits.dtype)
    for step in steps.unique().tolist():
        mine = (steps == step).nonzero().squeeze(1)
        for total, grad in zip(sums[:, step], grad_logits, strict=True):
            total += grad[mine].T @ states[mine]


def _chunk(
    loss: VocabLoss,
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
        _fill(loss.terms(block), block, term_buffers[:, cut], found.at(cut))
    for grad_states, grad_logits in zip(found.grads, term_buffers, strict=True):
        grad_states.copy_(grad_logits[: len(back)] @ head.draft_weight[:, : grad_states.shape[1]])


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
    return Block(q, p, log_q, q - p, entropy, acceptance, agreement, labels)


def _fill(terms: tuple[Term, ...], block: Block, term_buffers: Tensor, found: _Found) -> None:
    """Keeps a block's results; only now, for its log_q may lie in the first of the buffers."""
    found.acceptance.copy_(block.acceptance)
    found.agreement.copy_(block.agreement)
    for losses, grads, term in zip(found.losses, term_buffers, terms, strict=True):
        losses.copy_(term.loss)
        grads.copy_(term.grad)


class _ClosedForm(torch.autograd.Function):
    """Hangs gradients already computed in the forward onto `total` [S]."""

    @staticmethod
    def forward(
        ctx: Any, draft_states: Tensor, total: Tensor, grad: Tensor, kept: Tensor, steps: Tensor
    ) -> Tensor:
        ctx.save_for_backward(grad, kept, steps)
        ctx.states = draft_states.shape, draft_states.dtype
        return total.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride], the decorator hides names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad, kept, steps = ctx.saved_tensors
        shape, dtype = ctx.states
        scaled = (grad * grad_outputs[0][steps].unsqueeze(1)).to(dtype)
        return scaled.new_zeros(shape).index_copy_(0, kept, scaled), None, None, None, None


class _OwnHead(torch.autograd.Function):
    """Lets `total` [S] through and hangs the gradient of the draft's own head onto it."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, draft_head: Tensor, factors: Tensor, grads: Tensor
    ) -> Tensor:
        ctx.save_for_backward(torch.einsum("ns,nsvh->svh", factors, grads))
        ctx.dtype = draft_head.dtype
        return total.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride], the decorator hides names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grads,) = ctx.saved_tensors
        grad = torch.einsum("s,svh->vh", grad_outputs[0], grads)
        return grad_outputs[0], grad.to(ctx.dtype), None, None
