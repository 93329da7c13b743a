"""The module that fits a draft: weights of steps and rows, schedule, settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base import supervised_chain
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.losses.base import Loss
from mtptrain.losses.expected_length import ExpectedLength
from mtptrain.losses.kl import KL
from mtptrain.targets.base import Target
from mtptrain.train.clock import TrainClock
from mtptrain.train.module import DraftModule, TrainSettings
from mtptrain.train.vocabulary import AllTokens
from mtptrain.types import Completion, DraftBatch, UserError
from mtptrain.validate.simulated import pack

SHARED, SAME = MTPConfig(), KL()


@pytest.fixture
def batch(answers: list[Completion], document: Callable[..., Any]) -> DraftBatch:
    return pack([document(c, ("final",)) for c in answers[:4]])


@pytest.fixture
def batches(answers: list[Completion], document: Callable[..., Any]) -> list[DraftBatch]:
    """One of three documents, one of one."""
    documents = [document(c, ("final",)) for c in answers[:4]]
    return [pack(documents[:3]), pack(documents[3:])]


@pytest.fixture
def make(
    tiny_target: Target, backend: AttentionBackend, settings: TrainSettings
) -> Callable[..., DraftModule]:
    def build(
        config: MTPConfig = SHARED,
        steps: int = 100,
        loss: Loss = SAME,
        seed: int = 0,
        **changes: Any,
    ) -> DraftModule:
        how = replace(settings, **changes)
        draft = config.build(tiny_target)
        scoring = AllTokens(draft, 512)
        return DraftModule(draft, loss, how, backend, scoring, steps, seed=seed)

    return build


def _by_hand(
    module: DraftModule, batch: DraftBatch, mask: torch.Tensor
) -> list[list[torch.Tensor]]:
    """KL of each document's rows whose label the draft can say, per unrolled step."""
    draft, values = module.draft, []
    head = draft.head_rows()
    draft.requires_grad_(False)
    for step in draft.unroll(batch, module.settings.unroll_steps, mask, module.backend):
        labels = batch.input_ids[step.label_rows]
        said = torch.ones_like(labels, dtype=torch.bool)
        if draft.vocab is not None:
            said = torch.isin(labels, draft.vocab)
        p = F.log_softmax(batch.final[step.target_rows] @ head.T, -1)
        q = F.log_softmax(step.states @ head.T, -1)
        rows = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        borders = list(pairwise(batch.cu_seqlens.tolist()))
        where = [(step.label_rows >= a) & (step.label_rows < b) & said for a, b in borders]
        values.append([rows[w] for w in where])
    draft.requires_grad_(True)
    return values


@pytest.mark.parametrize("vocab", [(), tuple(range(0, 512, 2))])
def test_the_loss_is_the_weighted_mean_over_steps(
    vocab: tuple[int, ...], make: Callable[..., DraftModule], batch: DraftBatch
) -> None:
    """Each step's mean over its own rows, weighted by step_decay ** j over their sum; a row whose token a
    reduced vocabulary lacks teaches nothing."""
    module = make(MTPConfig(draft_vocab=vocab), unroll_steps=3, step_decay=0.5)
    rows = [torch.cat(step) for step in _by_hand(module, batch, batch.loss_mask)]
    values, counts = [float(x.mean()) for x in rows], [len(x) for x in rows]
    loss = float(module.training_step(batch, 0).detach())
    assert loss == pytest.approx((4 * values[0] + 2 * values[1] + values[2]) / 7, rel=1e-4)
    assert module.supervised_rows == counts[0] and counts[0] > counts[2] > 0


@pytest.mark.parametrize("vocab", [(), tuple(range(0, 512, 2))])
def test_samples_weigh_the_same_however_long(
    vocab: tuple[int, ...], make: Callable[..., DraftModule], batch: DraftBatch
) -> None:
    """With average=samples a step's loss is the mean over documents of each one's mean; a document without a
    supervised row is not counted, and supervised rows are counted as ever."""
    mask = batch.loss_mask.clone()
    mask[int(batch.cu_seqlens[1]) : int(batch.cu_seqlens[2])] = False
    batch = replace(batch, loss_mask=mask)
    module = make(MTPConfig(draft_vocab=vocab), average="samples", unroll_steps=3, step_decay=0.5)
    steps = _by_hand(module, batch, mask)
    values = [[float(d.mean()) for d in step if len(d)] for step in steps]
    first, second, third = (sum(x) / len(x) for x in values)
    loss = float(module.training_step(batch, 0).detach())
    assert loss == pytest.approx((4 * first + 2 * second + third) / 7, rel=1e-4)
    sizes = [len(d) for d in steps[0]]
    assert module.supervised_rows == sum(sizes) and sizes[1] == 0 and len(set(sizes)) > 2


def test_losses_over_chains_get_the_rows_of_one_origin(
    make: Callable[..., DraftModule], batch: DraftBatch
) -> None:
    """The expected length that a step of training sees is that of each row's own unrolled steps."""
    module = make(loss=ExpectedLength(), unroll_steps=3, step_decay=1.0)
    draft, head, kept, means = module.draft, module.draft.head_rows(), dict[int, float](), []
    with torch.no_grad():
        for j, step in enumerate(draft.unroll(batch, 3, batch.loss_mask, module.backend)):
            p = (batch.final[step.target_rows] @ head.T).softmax(-1)
            q = (step.states @ head.T).softmax(-1)
            lost = []
            for row, a in zip(step.label_rows - 2 - j, torch.minimum(p, q).sum(-1), strict=True):
                kept[int(row)] = kept.get(int(row), 1.0) * float(a)
                lost.append(1 - kept[int(row)])
            means.append(sum(lost) / len(lost))
    assert float(module.training_step(batch, 0).detach()) == pytest.approx(sum(means) / 3, rel=1e-4)


def test_noise_lies_on_what_the_draft_reads(
    make: Callable[..., DraftModule], batch: DraftBatch
) -> None:
    """Uniform, at most feature_noise, new for every batch, a function of seed and batch; what the draft is held
    against and the caller's batch stay as they are."""
    before = batch.features.clone()
    module, other = make(feature_noise=0.25, seed=3), make(feature_noise=0.25, seed=4)
    noisy = module._with_noise(batch, 7)
    noise = noisy.features - batch.features
    assert 0.24 < float(noise.max()) <= 0.2501 and -0.24 > float(noise.min()) >= -0.2501
    assert abs(float(noise.mean())) < 0.01 and float(noise.std()) == pytest.approx(
        0.25 / 3**0.5, rel=0.02
    )
    assert noisy.final is batch.final and noisy.input_ids is batch.input_ids
    assert torch.equal(noisy.features, module._with_noise(batch, 7).features)
    assert not torch.equal(noisy.features, module._with_noise(batch, 8).features)
    assert not torch.equal(noisy.features, other._with_noise(batch, 7).features)
    assert torch.equal(batch.features, before) and make()._with_noise(batch, 7) is batch


def test_noise_is_trained_through(make: Callable[..., DraftModule], batch: DraftBatch) -> None:
    """The loss of a training step is that of the noisy features against the true states."""
    plain, noisy = make(), make(feature_noise=0.5, seed=1)
    noisy.load_state_dict(plain.state_dict())
    loss = noisy.training_step(batch, 2).detach()
    torch.testing.assert_close(
        loss, plain.training_step(noisy._with_noise(batch, 2), 2).detach(), rtol=0, atol=0
    )
    assert not torch.equal(loss, plain.training_step(batch, 2).detach())


@pytest.mark.parametrize("average", ["rows", "samples"])
@pytest.mark.parametrize("vocab", [(), tuple(range(0, 512, 2))])
def test_batches_of_one_step_divide_by_the_rows_of_all(
    vocab: tuple[int, ...],
    average: str,
    make: Callable[..., DraftModule],
    batches: list[DraftBatch],
) -> None:
    """The gradient of a step over several batches of unequal size is that of one batch that holds them all."""
    how: dict[str, Any] = {"unroll_steps": 3, "step_decay": 0.5, "average": average}
    config = MTPConfig(draft_vocab=vocab)
    one, several = make(config, **how), make(config, accumulate=2, **how)
    several.load_state_dict(one.state_dict())
    several.whole_step = lambda step: batches
    loss = one.training_step(_joined(batches), 0)
    loss.backward()
    parts = [several.training_step(batch, i) / 2 for i, batch in enumerate(batches)]
    sum(parts, torch.zeros(())).backward()
    assert float(sum(p.detach() for p in parts)) == pytest.approx(float(loss.detach()), rel=1e-5)
    for a, b in zip(one.parameters(), several.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    assert several.supervised_rows == one.supervised_rows
    assert [several.ends_step(i) for i in range(4)] == [False, True, False, True]


def _joined(batches: list[DraftBatch]) -> DraftBatch:
    borders = [b.cu_seqlens for b in batches]
    lens = torch.cat([torch.diff(x) for x in borders])
    names = ("input_ids", "features", "final", "loss_mask")
    tensors = (torch.cat([getattr(b, n) for b in batches]) for n in names)
    return DraftBatch(*tensors, torch.cat([torch.zeros(1, dtype=torch.long), lens]).cumsum(0))


def test_later_steps_join_at_their_share(
    make: Callable[..., DraftModule], batch: DraftBatch
) -> None:
    """Before `unroll_from` of all batches only the first drafted step is trained, from there on all of them."""
    module = make(steps=10, unroll_steps=3, unroll_from=0.3)
    early, late = [], []
    for index in range(10):
        module.training_step(batch, index)
        steps = [k for k in module.metrics if k.startswith("train/acceptance_")]
        (early if index < 3 else late).append(len(steps))
    assert early == [1] * 3 and late == [3] * 7


def test_a_step_of_several_batches_unrolls_alike_in_all(
    make: Callable[..., DraftModule], batch: DraftBatch, tmp_path: Path
) -> None:
    """Time goes on within a step: later drafted steps join at its first batch, or with the next step."""
    now = [0.0]
    module = make(accumulate=2, unroll_steps=3, unroll_from=0.5)
    module.clock = TrainClock(tmp_path / "clock.csv", 0, minutes=1.0, now=lambda: now[0])
    with module.clock.paused():
        pass
    trained = []
    for index, now[0] in enumerate([0.0, 5.0, 10.0, 40.0, 41.0, 42.0]):
        module.training_step(batch, index)
        trained.append(sum(k.startswith("train/acceptance_") for k in module.metrics))
    assert trained == [1, 1, 1, 1, 3, 3]


def test_all_supervises_prompt_rows_too(
    make: Callable[..., DraftModule], batch: DraftBatch
) -> None:
    """With supervise=all every row of every document but its last two is supervised at step 0."""
    module = make(supervise="all")
    module.training_step(batch, 0)
    assert module.supervised_rows == len(batch.input_ids) - 2 * (len(batch.cu_seqlens) - 1)
    ours = make()
    ours.training_step(batch, 0)
    chain = supervised_chain(batch.loss_mask, batch.cu_seqlens, 1)
    assert ours.supervised_rows == int(chain.sum()) < module.supervised_rows


@pytest.mark.parametrize("answer_tokens", [0, 1])
def test_a_batch_that_supervises_nothing_is_harmless(
    answer_tokens: int, make: Callable[..., DraftModule], batch: DraftBatch
) -> None:
    """No answer, or answers of one token: the loss is 0 and no gradient is anything but 0."""
    mask = torch.zeros_like(batch.loss_mask)
    mask[batch.cu_seqlens[1:] - 1] = answer_tokens == 1
    module = make(unroll_steps=3)
    loss = module.training_step(replace(batch, loss_mask=mask), 0)
    loss.backward()
    assert float(loss.detach()) == 0 and module.supervised_rows == 0
    assert all(p.grad is None or not bool(p.grad.any()) for p in module.parameters())


def test_the_frozen_target_is_not_part_of_it(make: Callable[..., DraftModule]) -> None:
    """Neither its parameters nor its tables are trained, moved or saved with the module."""
    module = make(MTPConfig(depth=2))
    assert set(module.state_dict()) == {f"draft.{n}" for n, _ in module.draft.named_parameters()}
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_lowers_the_loss(
    optimizer: str, make: Callable[..., DraftModule], batch: DraftBatch
) -> None:
    """Twenty steps on one batch halve it, with either optimiser."""
    rate = {"adamw": 5e-3, "muon": 2e-2}[optimizer]
    module = make(steps=20, optimizer=optimizer, learning_rate=rate, unroll_steps=2)
    parts, losses = module.configure_optimizers(), []
    for step in range(20):
        loss = module.training_step(batch, step)
        losses.append(float(loss.detach()))
        loss.backward()
        parts["optimizer"].step()
        parts["lr_scheduler"]["scheduler"].step()
        parts["optimizer"].zero_grad()
    assert losses[-1] < 0.5 * losses[0]


def test_the_rate_warms_up_and_falls_to_zero(make: Callable[..., DraftModule]) -> None:
    """Linear over the first share of all steps, then a cosine to zero at the last one."""
    module = make(steps=100, warmup=0.1)
    rates = [module._schedule(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0 and rates[55] == pytest.approx(0.5) and rates[100] == pytest.approx(0)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "sgd"}, "train.optimizer=sgd is unknown; use adamw or muon"),
        ({"supervise": "some"}, "train.supervise=some is unknown; use assistant or all"),
        ({"average": "tokens"}, "train.average=tokens is unknown; use rows or samples"),
        ({"accumulate": 0}, "train.accumulate=0 must be at least 1"),
        ({"epochs": 0}, "train.epochs=0 must be at least 1"),
        ({"unroll_steps": 0}, "train.unroll_steps=0 must be at least 1"),
        ({"checkpoint_every": 0}, "train.checkpoint_every=0 must be at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    change: dict[str, Any], message: str, settings: TrainSettings
) -> None:
    """Each by its key, with what may be chosen."""
    with pytest.raises(UserError, match=message):
        replace(settings, **change)
