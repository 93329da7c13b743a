"""What the walk over chunks promises for every loss: sums, memory, masks, shared targets, steps, dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtptrain.losses.base import Loss, LossSums, VocabLoss
from mtptrain.losses.base.chunks import compute
from mtptrain.losses.cross_entropy import CrossEntropy
from mtptrain.losses.d_pace import DPace
from mtptrain.losses.expected_length import ExpectedLength
from mtptrain.losses.jsd import JSD
from mtptrain.losses.kl import KL
from mtptrain.losses.lk import LK
from mtptrain.losses.log_acceptance import LogAcceptance
from mtptrain.losses.reverse_kl import ReverseKL
from mtptrain.losses.smooth_l1 import SmoothL1
from mtptrain.losses.tv import TV
from mtptrain.losses.weighted_sum import WeightedSum

R, H, V = 60, 13, 301
VOCAB_LOSSES: list[VocabLoss] = [
    KL(),
    ReverseKL(),
    JSD(),
    TV(),
    LK(),
    LogAcceptance(),
    CrossEntropy(),
    ExpectedLength(),
    DPace(),
]
MIXED = WeightedSum({"a": LK(), "b": SmoothL1(), "c": KL()}, {"a": 0.5, "b": 1.0, "c": 0.1})
LOSSES: list[Loss] = [*VOCAB_LOSSES, SmoothL1(), MIXED]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda x: type(x).__name__)
vocab_losses = pytest.mark.parametrize("loss", VOCAB_LOSSES, ids=lambda x: type(x).__name__)


def _inputs(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    draft, target = scale * torch.randn(R, H), scale * torch.randn(R, H)
    labels, head = torch.randint(0, V, (R,)), torch.randn(V, H)
    return draft.requires_grad_(), target, labels, torch.rand(R) + 0.1, head


def _grad(sums: LossSums, states: Tensor) -> Tensor:
    return torch.autograd.grad(sums.loss.sum(), states)[0]


class _Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation gave."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@vocab_losses
def test_no_whole_vocabulary_tensor(loss: VocabLoss) -> None:
    """Forward and backward make nothing above a chunk of logits a term (or the head itself)."""
    draft, target, labels, weights, head = _inputs()
    with _Largest() as largest:
        compute(loss, draft, target, labels, weights, head, chunk_rows=8).loss.backward()
    assert 8 * V <= largest.elements <= max(loss.num_terms * 8 * V, V * H) < R * V


@vocab_losses
def test_an_own_head_makes_no_whole_vocabulary_tensor_either(loss: VocabLoss) -> None:
    """What it adds is the size of the head, whatever the number of rows."""
    draft, target, labels, weights, head = _inputs()
    own = head.clone().requires_grad_()
    with _Largest() as largest:
        compute(
            loss, draft, target, labels, weights, head, chunk_rows=8, draft_head=own
        ).loss.backward()
    assert V * H <= largest.elements <= max(loss.num_terms * 8 * V, V * H) < R * V


@vocab_losses
def test_an_own_head_equal_to_the_frozen_one(loss: VocabLoss) -> None:
    """It changes no bit of sums and state gradients, and gets a gradient only where it is to be trained, in
    its own dtype."""
    draft, target, labels, weights, head = _inputs()
    plain = compute(loss, draft, target, labels, weights, head)
    fixed = compute(loss, draft, target, labels, weights, head, draft_head=head)
    own = head.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        trained = compute(loss, draft, target, labels, weights, head, draft_head=own)
    grad = _grad(plain, draft)
    for sums in (fixed, trained):
        assert torch.equal(sums.loss, plain.loss)
        assert torch.equal(sums.acceptance, plain.acceptance)
        assert torch.equal(_grad(sums, draft), grad)
    half = head.bfloat16()
    compute(loss, draft, target.bfloat16(), labels, weights, half, draft_head=own).loss.backward()
    assert own.grad is not None and own.grad.dtype == torch.float32 and bool(own.grad.any())
    assert head.grad is None
    with torch.no_grad():
        assert not compute(
            loss, draft, target, labels, weights, head, draft_head=own
        ).loss.requires_grad


@vocab_losses
def test_an_own_head_may_be_narrower_than_the_frozen_one(loss: VocabLoss) -> None:
    """A draft of another width: its states give the same as if both were padded with zeros to the target's."""
    draft, target, labels, weights, head = _inputs()
    states = draft.detach()[:, :7].clone().requires_grad_()
    own = (head[:, :7] + 0.1).requires_grad_()
    padded = [F.pad(x.detach(), (0, H - 7)).requires_grad_() for x in (states, own)]
    narrow = compute(loss, states, target, labels, weights, head, draft_head=own)
    wide = compute(loss, padded[0], target, labels, weights, head, draft_head=padded[1])
    torch.testing.assert_close(narrow.loss, wide.loss)
    grads = torch.autograd.grad(narrow.loss, (states, own))
    for mine, theirs in zip(grads, torch.autograd.grad(wide.loss, padded), strict=True):
        torch.testing.assert_close(mine, theirs[:, :7], atol=1e-5, rtol=1e-4)


@vocab_losses
def test_an_own_head_learns_from_fixed_states(loss: VocabLoss) -> None:
    """States that need no gradient do not keep the head from getting its own; masked rows give it none."""
    draft, target, labels, weights, head = _inputs()
    own = (head + 0.1).requires_grad_()
    both = compute(loss, draft, target, labels, weights, head, draft_head=own)
    alone = compute(loss, draft.detach(), target, labels, weights, head, draft_head=own)
    grads = [torch.autograd.grad(sums.loss, own)[0] for sums in (both, alone)]
    assert torch.equal(*grads) and bool(grads[0].any())
    nothing = compute(loss, draft, target, labels, 0 * weights, head, draft_head=own)
    assert not bool(torch.autograd.grad(nothing.loss, own)[0].any())


@every_loss
def test_all_rows_masked(loss: Loss) -> None:
    """Without a supervised row every sum is 0 and the gradient is 0, even where states are NaN."""
    draft, target, labels, weights, head = _inputs()
    states = torch.full_like(draft, torch.nan).requires_grad_()
    sums = compute(loss, states, target, labels, 0 * weights, head)
    for total in (sums.loss, sums.count, sums.acceptance, sums.agreement):
        assert torch.equal(total, torch.zeros(()))
    assert torch.equal(_grad(sums, states), torch.zeros(R, H))


@every_loss
def test_masked_row_is_never_read(loss: Loss) -> None:
    """A row of weight 0 may hold NaN: it changes no sum and gets gradient 0."""
    draft, target, labels, weights, head = _inputs()
    weights[5] = 0
    clean = compute(loss, draft, target, labels, weights, head)
    spoilt = torch.where(torch.arange(R).unsqueeze(1) == 5, torch.nan, draft)
    dirty = compute(loss, spoilt, target, labels, weights, head)
    assert torch.equal(clean.loss, dirty.loss) and torch.equal(clean.count, dirty.count)
    assert torch.equal(_grad(dirty, draft), _grad(clean, draft))


@every_loss
def test_sums_not_means(loss: Loss) -> None:
    """Doubling every weight doubles loss, count, counters and gradient."""
    draft, target, labels, weights, head = _inputs()
    one = compute(loss, draft, target, labels, weights, head)
    two = compute(loss, draft, target, labels, 2 * weights, head)
    for name in ("loss", "count", "acceptance", "agreement"):
        torch.testing.assert_close(getattr(two, name), 2 * getattr(one, name))
    torch.testing.assert_close(_grad(two, draft), 2 * _grad(one, draft))


@every_loss
def test_huge_logits_stay_finite(loss: Loss) -> None:
    """Logits of tens of thousands, where softmaxes underflow to 0, give finite values."""
    draft, target, labels, weights, head = _inputs(scale=1e4)
    sums = compute(loss, draft, target, labels, weights, head)
    assert sums.loss.isfinite() and sums.acceptance.isfinite()
    assert _grad(sums, draft).isfinite().all()


@every_loss
def test_shared_target_rows(loss: Loss) -> None:
    """`target_rows` is the same as repeating target rows, in any order and across chunk borders."""
    draft, target, labels, weights, head = _inputs()
    index = torch.randint(0, 9, (R,))
    weights[::7] = 0
    shared = compute(
        loss, draft, target[:9], labels, weights, head, target_rows=index, chunk_rows=11
    )
    plain = compute(loss, draft, target[index], labels, weights, head)
    for name in ("loss", "count", "acceptance", "agreement"):
        torch.testing.assert_close(getattr(shared, name), getattr(plain, name))
    torch.testing.assert_close(_grad(shared, draft), _grad(plain, draft), rtol=1e-4, atol=1e-6)


@every_loss
def test_step_rows(loss: Loss) -> None:
    """Steps concatenated in one call give what one call a step gives, an empty step included."""
    draft, target, labels, weights, head = _inputs()
    sizes = (30, 0, 19, 11)
    together = compute(loss, draft, target, labels, weights, head, step_rows=sizes)
    parts = zip(*(x.split(sizes) for x in (draft, target, labels, weights)), strict=True)
    alone = [compute(loss, d, t, y, w, head) for d, t, y, w in parts]
    for name in ("loss", "count", "acceptance", "agreement"):
        wanted = torch.stack([getattr(sums, name) for sums in alone])
        torch.testing.assert_close(getattr(together, name), wanted)
    decay = torch.tensor([1.0, 0.8, 0.64, 0.512])
    weighted = (torch.stack([sums.loss for sums in alone]) * decay).sum()
    got, want = (
        torch.autograd.grad(x, draft)[0] for x in ((together.loss * decay).sum(), weighted)
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_step_rows_must_add_up() -> None:
    """Step sizes that do not add up to the rows are refused, with both numbers."""
    draft, target, labels, weights, head = _inputs()
    with pytest.raises(ValueError, match=r"step_rows \(30, 20\) must add up to 60 rows"):
        compute(KL(), draft, target, labels, weights, head, step_rows=(30, 20))


@vocab_losses
def test_small_blocks(loss: VocabLoss, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block that keeps copies in cache does not show in the result."""
    draft, target, labels, weights, head = _inputs()
    index = torch.arange(R) // 3
    whole = compute(loss, draft, target, labels, weights, head, target_rows=index)
    monkeypatch.setattr("mtptrain.losses.base.walk._BLOCK_ELEMENTS_PER_THREAD", 4 * V)
    cut = compute(loss, draft, target, labels, weights, head, target_rows=index, chunk_rows=17)
    torch.testing.assert_close(cut.loss, whole.loss)
    torch.testing.assert_close(_grad(cut, draft), _grad(whole, draft), rtol=1e-4, atol=1e-6)


@vocab_losses
def test_bfloat16(loss: VocabLoss) -> None:
    """With bf16 states and head, sums are fp32, near fp32's, and the gradient is bf16."""
    draft, target, labels, weights, head = _inputs()
    states = draft.detach().bfloat16().requires_grad_()
    sums = compute(loss, states, target.bfloat16(), labels, weights, head.bfloat16())
    exact = compute(loss, draft, target, labels, weights, head)
    assert sums.loss.dtype == sums.acceptance.dtype == torch.float32
    torch.testing.assert_close(sums.loss, exact.loss, rtol=0.03, atol=0)
    assert _grad(sums, states).dtype == torch.bfloat16


@vocab_losses
def test_autocast_changes_nothing(loss: VocabLoss) -> None:
    """Under autocast the head's dtype, fp32 here, still rules."""
    draft, target, labels, weights, head = _inputs()
    plain = compute(loss, draft, target, labels, weights, head)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = compute(loss, draft, target, labels, weights, head)
    assert torch.equal(plain.loss, mixed.loss)


def test_evaluation_without_gradient() -> None:
    """States that need no gradient give the same sums, and a loss without a graph."""
    draft, target, labels, weights, head = _inputs()
    trained = compute(LK(), draft, target, labels, weights, head)
    judged = compute(LK(), draft.detach(), target, labels, weights, head)
    assert torch.equal(trained.loss, judged.loss) and not judged.loss.requires_grad


@pytest.mark.parametrize(
    "loss", [x for x in LOSSES if not isinstance(x, CrossEntropy | DPace | SmoothL1)]
)
def test_perfect_draft(loss: Loss) -> None:
    """A draft equal to the target is accepted whole, agrees everywhere and costs nothing."""
    _, target, labels, weights, head = _inputs()
    states = target.clone().requires_grad_()
    sums = compute(loss, states, target, labels, weights, head)
    torch.testing.assert_close(sums.acceptance, sums.count)
    torch.testing.assert_close(sums.agreement, sums.count)
    torch.testing.assert_close(sums.loss, torch.zeros(()), rtol=0, atol=1e-4)
    torch.testing.assert_close(_grad(sums, states), torch.zeros(R, H), rtol=0, atol=1e-5)
