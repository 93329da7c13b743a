"""The walk of `chunks`: a chunk of rows goes through the head, and its gradient overwrites its logits.

Nothing here knows autograd: it finds every term's value and gradient of every row, and, on the way back, the
gradient of a draft's own head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.layers.product import product
from mtptrain.losses.base.formula import Block, Term, VocabLoss
from mtptrain.losses.base.rows import Rows

# Elements of a block: a thread's share stays in cache on CPU; elsewhere, launches stay cheap.
_BLOCK_ELEMENTS_PER_THREAD, _BLOCK_ELEMENTS = 2**19, 2**26
# Logits of a chunk on a CPU: glibc hands memory out again, already touched, only in pieces below 32 MiB.
_CHUNK_BYTES = 24 * 2**20


@dataclass(frozen=True)
class TwoHeads:
    """The frozen head, and what scores the draft's states; what they give is in the former's dtype."""

    weight: Tensor  # [Vd, H]
    draft_weight: Tensor  # [Vd, Hd], `weight` itself unless the draft has a head of its own
    beside: Tensor | None  # [Vd, r] what scores the last r entries of a draft's state of Hd + r
    temperature: float

    @classmethod
    def of(
        cls, weight: Tensor, draft_head: Tensor | None, beside: Tensor | None, temperature: float
    ) -> TwoHeads:
        own = weight if draft_head is None else draft_head
        beside = None if beside is None else beside.detach().to(weight.dtype)
        return cls(weight.detach(), own.detach().to(weight.dtype), beside, temperature)

    def target_logits(self, states: Tensor) -> Tensor:
        """[C, H] to [C, Vd]; the temperature comes in `softmax`."""
        return product(states.to(self.weight.dtype), self.weight)

    def draft_logits(self, states: Tensor) -> Tensor:
        """[C, W] to [C, Vd]."""
        hidden = self.draft_weight.shape[1]
        states = states.to(self.weight.dtype)
        out = product(states[:, :hidden], self.draft_weight)
        return out if self.beside is None else out.addmm_(states[:, hidden:], self.beside.T)

    def back(self, grad_logits: Tensor, grads: Tensor) -> None:
        """[C, Vd] back to the states' gradients, into `grads` [C, W]."""
        hidden = self.draft_weight.shape[1]
        grads[:, :hidden] = product(grad_logits, self.draft_weight.T)
        if self.beside is not None:
            grads[:, hidden:] = grad_logits @ self.beside

    def softmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax and its logarithm, fp32, one exp for both; may overwrite the logits."""
        logits = logits.float()
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        probs = logits.softmax(-1)
        peak = probs.amax(-1, keepdim=True).log_()  # from the peak, for probs may underflow to 0
        return probs, logits.sub_(logits.amax(-1, keepdim=True)).add_(peak)


@dataclass(frozen=True)
class Found:
    """What N terms gave on K kept rows, before weights and mixing; fp32."""

    losses: Tensor  # [N, K]
    grads: Tensor  # [N, K, W] d loss / d draft states; [N, K, 0] where those need none
    acceptance: Tensor  # [K]
    agreement: Tensor  # [K]

    def at(self, part: slice) -> Found:
        """Views of some of the rows, to be filled."""
        rowwise = (self.acceptance[part], self.agreement[part])
        return Found(self.losses[:, part], self.grads[:, part], *rowwise)


def _block_rows(head_weight: Tensor) -> int:
    on_cpu = head_weight.device.type == "cpu"
    limit = _BLOCK_ELEMENTS_PER_THREAD * torch.get_num_threads() if on_cpu else _BLOCK_ELEMENTS
    return max(1, limit // len(head_weight))


def _slices(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


@dataclass(frozen=True)
class Work:
    """Rows to compare, and by what."""

    losses: Sequence[VocabLoss]
    head: TwoHeads
    rows: Rows
    draft_states: Tensor  # [R, W]
    target_states: Tensor  # [T, H]
    labels: Tensor  # [R]
    chunk_rows: int
    stands_for: Tensor | None = None  # [Vd] tokens of a larger vocabulary; None: one each

    def nothing_found(self, width: int) -> Found:
        """Zeros, to be filled; `width` is W, or 0 where nobody asks for the states' gradients."""
        terms, kept = sum(loss.num_terms for loss in self.losses), len(self.rows.kept)
        shapes = (terms, kept), (terms, kept, width), (kept,), (kept,)
        return Found(*(self.rows.share.new_zeros(shape) for shape in shapes))


@torch.no_grad()
def walk(work: Work, needs_grads: bool) -> Found:
    """All kept rows; the head stays unused without losses."""
    found = work.nothing_found(work.draft_states.shape[1] if needs_grads else 0)
    for part, grad_logits in _chunks(work, found):
        if needs_grads:
            for grads, of_term in zip(found.at(part).grads, grad_logits, strict=True):
                work.head.back(of_term, grads)
        del grad_logits
    if work.head.temperature != 1.0:
        found.grads.div_(work.head.temperature)
    return found


@torch.no_grad()
def own_head_grad(work: Work, factors: Tensor, columns: slice) -> Tensor:
    """Gradient of what scores some columns [w] of the draft's states, [Vd, w] fp32, where value [n, k] counts
    `factors` [N, K]."""
    read = work.draft_states[:, columns]
    total = read.new_zeros(len(work.head.weight), read.shape[1], dtype=torch.float32)
    for part, grad_logits in _chunks(work, work.nothing_found(0)):
        states = read[work.rows.kept[part]]
        for factor, of_term in zip(factors[:, part], grad_logits, strict=True):
            total += product(of_term.T, (factor.unsqueeze(1) * states).to(of_term.dtype).T)
        del grad_logits
    return total.div_(work.head.temperature)


def _chunks(work: Work, found: Found) -> Iterator[tuple[slice, Sequence[Tensor]]]:
    """Each chunk of the kept rows and the gradients of its terms in the draft's logits, [C, Vd] each, before the
    temperature; fills in the rows' values. A chunk should be let go before the next is asked for."""
    kept = len(work.rows.kept) if work.losses else 0
    for part in _slices(kept, _chunk_rows(work)):
        yield part, _chunk(work, part, found.at(part))


def _chunk_rows(work: Work) -> int:
    if work.head.weight.device.type != "cpu":
        return work.chunk_rows
    return max(1, min(work.chunk_rows, _CHUNK_BYTES // work.head.weight[:, 0].nbytes))


def _chunk(work: Work, part: slice, found: Found) -> list[Tensor]:
    """The draft's logits become the gradients of the first term, block by block."""
    head, index = work.head, work.rows.kept[part]
    once, back = work.rows.targets[part].unique_consecutive(return_inverse=True)
    target_logits = head.target_logits(work.target_states[once])
    draft_logits = head.draft_logits(work.draft_states[index])
    grads = [draft_logits, *(torch.empty_like(draft_logits) for _ in found.losses[1:])]
    grads = grads[: len(found.losses)]  # a loss may look at the vocabulary for its counts alone
    labels = work.labels[index]
    for cut in _slices(len(back), _block_rows(head.weight)):
        block = _compare(head, target_logits, back[cut], draft_logits[cut], labels[cut])
        terms = [term for loss in work.losses for term in loss.terms(block)]
        accepted = _acceptance(block, work.stands_for)
        _fill(terms, block, accepted, [of_term[cut] for of_term in grads], found.at(cut))
    return grads


def _compare(
    head: TwoHeads, target_logits: Tensor, back: Tensor, draft_logits: Tensor, labels: Tensor
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


def _acceptance(block: Block, stands_for: Tensor | None) -> Tensor:  # [C]
    """sum_x min(p, q), of a sampled vocabulary as an estimate over the whole: a drawn token counts as all that it
    stands for, in both normalisers as in the sum. The sample's own would leave out most of the tail, where the two
    agree least."""
    if stands_for is None:
        return block.acceptance
    p, q = block.p * stands_for, block.q * stands_for
    return torch.minimum(p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)).sum(-1)


def _fill(
    terms: Sequence[Term], block: Block, accepted: Tensor, buffers: Sequence[Tensor], found: Found
) -> None:
    """Keeps a block's results; only now, for its log_q may lie in the first of the buffers."""
    found.acceptance.copy_(accepted)
    found.agreement.copy_(block.agreement)
    for losses, grads, term in zip(found.losses, buffers, terms, strict=True):
        losses.copy_(term.loss)
        grads.copy_(term.grad)
