"""Every loss against a naive float64 autograd version, in value and gradient, at odd shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mtptrain.losses.base import FeatureLoss, VocabLoss
from mtptrain.losses.base.chunks import compute
from mtptrain.losses.confidence import Confidence
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
from mtptrain.types import UserError

R, H, V = 41, 17, 401
Naive = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # p, q, labels, weights to rows [R]


def _kl(p: Tensor, q: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


def _tv(p: Tensor, q: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return 0.5 * (p - q).abs().sum(-1)


def _lk(p: Tensor, q: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    acceptance = (torch.minimum(p, q).sum(-1) * weights).sum() / weights.sum()
    share = (-3.0 * acceptance.detach()).exp()
    kl, tv = _kl(p, q, labels, weights), _tv(p, q, labels, weights)
    return share * kl + (1 - share) * tv


def _cross_entropy(p: Tensor, q: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    rows = -q.log().gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return rows * (labels >= 0)


def _reverse_kl(p: Tensor, q: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (q * (q / p).log()).sum(-1)


def _jsd(beta: float) -> Naive:
    def rows(p: Tensor, q: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        m = beta * p + (1 - beta) * q
        return (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)

    return rows


def _log_acceptance(p: Tensor, q: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return -torch.minimum(p, q).sum(-1).log()


def _d_pace(p: Tensor, q: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    said = q.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1).detach()
    return (0.5 + 0.5 * said) * _cross_entropy(p, q, labels, weights)


NAIVE: list[tuple[VocabLoss, Naive]] = [
    (KL(), _kl),
    (ReverseKL(), _reverse_kl),
    (JSD(), _jsd(0.5)),
    (JSD(0.1), _jsd(0.1)),
    (TV(), _tv),
    (LK(), _lk),
    (LogAcceptance(), _log_acceptance),
    (CrossEntropy(), _cross_entropy),
    (ExpectedLength(), _tv),  # of a row that is a chain of its own
    (DPace(), _d_pace),
]
kinds = pytest.mark.parametrize(("loss", "naive"), NAIVE, ids=lambda x: type(x).__name__)


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(7)
    draft, target = torch.randn(R, H, dtype=torch.float64), torch.randn(R, H, dtype=torch.float64)
    labels = torch.randint(-1, V, (R,))
    labels[3] = -1
    weights = torch.rand(R, dtype=torch.float64)
    weights[::4] = 0
    head = 0.7 * torch.randn(V, H, dtype=torch.float64)
    draft, target, weights, head = (x.to(dtype) for x in (draft, target, weights, head))
    return draft.requires_grad_(), target, labels, weights, head


def _gradient_error(loss: VocabLoss) -> float:
    """What fp32 may err by; the reverse divergence adds up large logarithms that cancel."""
    return 5e-5 if isinstance(loss, ReverseKL) else 1e-5


@kinds
@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sum_and_gradient(
    loss: VocabLoss, naive: Naive, chunk_rows: int, temperature: float
) -> None:
    """Any chunk size gives the weighted sum and the gradient of plain float64 autograd."""
    draft, target, labels, weights, head = _inputs(torch.float64)
    p = (target @ head.T / temperature).softmax(-1)
    q = (draft @ head.T / temperature).softmax(-1)
    expected = (naive(p, q, labels, weights) * weights).sum()
    expected.backward()

    states, *rest = _inputs(torch.float32)
    sums = compute(loss, states, *rest, chunk_rows=chunk_rows, temperature=temperature)
    (3 * sums.loss).backward()
    torch.testing.assert_close(sums.loss.double(), expected, rtol=2e-5, atol=1e-5)
    assert states.grad is not None and draft.grad is not None
    atol = _gradient_error(loss)
    torch.testing.assert_close(states.grad.double(), 3 * draft.grad, rtol=1e-4, atol=atol)


@kinds
@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_head_of_the_drafts_own(
    loss: VocabLoss, naive: Naive, chunk_rows: int, temperature: float
) -> None:
    """The draft scored by its own rows, the target by the frozen ones: values and the gradients of states and
    own head are float64 autograd's, with each step's own factors and incoming gradient."""
    sizes, scales = (20, 0, R - 20), (3.0, 5.0, 0.5)
    draft, target, labels, weights, head = _inputs(torch.float64)
    own = (head + 0.3 * torch.randn_like(head)).requires_grad_()
    p = (target @ head.T / temperature).softmax(-1)
    q = (draft @ own.T / temperature).softmax(-1)
    steps = zip(*(x.split(sizes) for x in (p, q, labels, weights)), strict=True)
    expected = [(naive(*step) * step[-1]).sum() for step in steps if len(step[0])]
    (3.0 * expected[0] + 0.5 * expected[1]).backward()

    states, *rest = _inputs(torch.float32)
    mine = own.detach().float().requires_grad_()
    how = {"chunk_rows": chunk_rows, "temperature": temperature, "step_rows": sizes}
    sums = compute(loss, states, *rest, draft_head=mine, **how)
    (sums.loss * torch.tensor(scales)).sum().backward()
    got = sums.loss.detach()[[0, 2]].double()
    torch.testing.assert_close(got, torch.stack(expected).detach(), rtol=2e-5, atol=1e-5)
    for ours, exact in ((states, draft), (mine, own)):
        assert ours.grad is not None and exact.grad is not None
        atol = _gradient_error(loss)
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=atol)


@kinds
@pytest.mark.parametrize("chunk_rows", [7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_trained_columns_beside_the_frozen_head(
    loss: VocabLoss, naive: Naive, chunk_rows: int, temperature: float
) -> None:
    """States longer than the target's are scored by the frozen rows and by columns of the draft's own: values and
    the gradients of states and columns are float64 autograd's."""
    draft, target, labels, weights, head = _inputs(torch.float64)
    more = torch.randn(len(draft), 4, dtype=torch.float64)
    wide = torch.cat([draft.detach(), more], 1).requires_grad_()
    columns = torch.randn(len(head), 4, dtype=torch.float64).requires_grad_()
    p = (target @ head.T / temperature).softmax(-1)
    q = (wide @ torch.cat([head, columns], 1).T / temperature).softmax(-1)
    expected = (naive(p, q, labels, weights) * weights).sum()
    (3.0 * expected).backward()

    _, *rest = _inputs(torch.float32)
    states, mine = (x.detach().float().requires_grad_() for x in (wide, columns))
    how = {"chunk_rows": chunk_rows, "temperature": temperature}
    sums = compute(loss, states, *rest, beside=mine, **how)
    (3.0 * sums.loss).backward()
    torch.testing.assert_close(sums.loss.double(), expected, rtol=2e-5, atol=1e-5)
    for ours, exact in ((states, wide), (mine, columns)):
        assert ours.grad is not None and exact.grad is not None
        atol = _gradient_error(loss)
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=atol)


@kinds
def test_counters(loss: VocabLoss, naive: Naive) -> None:
    """Count, acceptance and agreement are weighted sums; label losses leave out unlabelled rows."""
    draft, target, labels, weights, head = _inputs(torch.float64)
    if loss.needs_labels:
        weights = weights * (labels >= 0)
    p, q = (target @ head.T).softmax(-1), (draft @ head.T).softmax(-1)
    sums = compute(loss, *_inputs(torch.float32), chunk_rows=7)
    expected = (
        weights.sum(),
        (weights * torch.minimum(p, q).sum(-1)).sum(),
        (weights * (p.argmax(-1) == q.argmax(-1))).sum(),
    )
    for got, want in zip((sums.count, sums.acceptance, sums.agreement), expected, strict=True):
        torch.testing.assert_close(got.double(), want.detach(), rtol=1e-5, atol=1e-5)
        assert not got.requires_grad


def test_log_acceptance_of_a_hopeless_row() -> None:
    """Where q and p share no token to fp32, value and gradient are still those of the formula."""
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    states = torch.tensor([[120.0, 0.0]], requires_grad=True)
    target, labels, weights = torch.tensor([[0.0, 150.0]]), torch.zeros(1).long(), torch.ones(1)
    sums = compute(LogAcceptance(), states, target, labels, weights, head)
    sums.loss.backward()
    exact = states.detach().double().requires_grad_()
    q, p = ((x @ head.double().T).log_softmax(-1) for x in (exact, target.double()))
    expected = -torch.minimum(p, q).logsumexp(-1).sum()
    expected.backward()
    assert float(sums.acceptance) < 1e-37
    torch.testing.assert_close(sums.loss.double(), expected)
    assert states.grad is not None and exact.grad is not None and bool(exact.grad.any())
    torch.testing.assert_close(states.grad.double(), exact.grad)


@pytest.mark.parametrize("chunk_rows", [7, 64])
def test_confidence(chunk_rows: int) -> None:
    """Binary cross-entropy against sum_x min(p, q), summed over weighted rows; only the confidence learns."""
    draft, target, labels, weights, head = _inputs(torch.float64)
    logits = torch.randn(len(draft), dtype=torch.float64, requires_grad=True)
    p, q = (target @ head.T).softmax(-1), (draft @ head.T).softmax(-1)
    accepted = torch.minimum(p, q).sum(-1).detach()
    sure = logits.sigmoid()
    rows = -(accepted * sure.log() + (1 - accepted) * (1 - sure).log())
    expected = (rows * weights).sum()
    expected.backward()

    states, *rest = _inputs(torch.float32)
    mine = logits.detach().float().requires_grad_()
    sums = compute(Confidence(), states, *rest, chunk_rows=chunk_rows, confidence=mine)
    sums.loss.backward()
    torch.testing.assert_close(sums.loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert mine.grad is not None and logits.grad is not None
    torch.testing.assert_close(mine.grad.double(), logits.grad, rtol=1e-4, atol=1e-6)
    assert states.grad is None or not bool(states.grad.any())
    together = WeightedSum({"a": KL(), "b": Confidence()}, {"a": 0.5, "b": 2.0})
    both = compute(together, states, *rest, chunk_rows=chunk_rows, confidence=mine)
    alone = compute(KL(), states, *rest, chunk_rows=chunk_rows)
    torch.testing.assert_close(both.loss, 0.5 * alone.loss + 2.0 * sums.loss)
    torch.testing.assert_close(both.acceptance, alone.acceptance)


def test_a_confidence_that_no_draft_states_is_the_users_error() -> None:
    """One line that names the draft which does."""
    with pytest.raises(UserError, match="^loss=confidence needs .*; use draft=dspark$"):
        compute(Confidence(), *_inputs(torch.float32))


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_smooth_l1(beta: float) -> None:
    """SmoothL1 is its textbook formula, meant over H and summed over weighted rows."""
    draft, target, _, weights, _ = _inputs(torch.float64)
    distance = (draft - target).abs()
    rows = torch.where(distance < beta, 0.5 * distance**2 / beta, distance - 0.5 * beta).mean(-1)
    expected = (rows * weights).sum()
    expected.backward()

    loss: FeatureLoss = SmoothL1(beta)
    states, *rest = _inputs(torch.float32)
    sums = compute(loss, states, *rest)
    sums.loss.backward()
    torch.testing.assert_close(sums.loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert states.grad is not None and draft.grad is not None
    torch.testing.assert_close(states.grad.double(), draft.grad, rtol=1e-4, atol=1e-6)
    assert (sums.acceptance, sums.agreement) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(LK, -1.0), (SmoothL1, 0.0), (JSD, 0.0), (JSD, 1.0), (DPace, -0.1), (DPace, float("nan"))],
)
def test_bad_hyperparameter(kind: Callable[[float], object], value: float) -> None:
    """A hyperparameter outside its range is the user's error, in one line that names it."""
    with pytest.raises(UserError, match=r"^loss\.(eta|beta|alpha) is .*: give a number") as error:
        kind(value)
    assert "\n" not in str(error.value)
