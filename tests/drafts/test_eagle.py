"""The EAGLE head: its layout, the noise of its training, and the choices it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.eagle import EagleConfig
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.targets.base import Target
from mtptrain.types import Completion, DraftBatch, UserError
from mtptrain.validate.simulated import pack


@pytest.fixture
def batch(answers: list[Completion], document: Callable[..., tuple[Tensor, ...]]) -> DraftBatch:
    """Two documents of unequal length."""
    long = max(answers[:8], key=lambda c: len(c.request.prompt_ids))
    return pack([document(c, ("final",)) for c in (answers[0], long)])  # pyright: ignore


def test_the_layout_is_that_of_mtp_without_norms(
    tiny_target: Target, backend: AttentionBackend, batch: DraftBatch
) -> None:
    """With the same weights it computes what an MTP head of one module without norms computes."""
    eagle = EagleConfig(embedding_scale=0.3, feature_noise=0.0).build(tiny_target)
    mtp = MTPConfig(norms="none", embedding_scale=0.3).build(tiny_target)
    names = {name.replace("body.", "steps.0."): p for name, p in eagle.state_dict().items()}
    mtp.load_state_dict(names)
    pairs = zip(*(x.unroll(batch, 3, batch.loss_mask, backend) for x in (eagle, mtp)), strict=True)
    assert all(torch.equal(a.states, b.states) and len(a.states) for a, b in pairs)


def test_noise_goes_by_the_length_of_the_text(
    tiny_target: Target,
    backend: AttentionBackend,
    batch: DraftBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While training, every feature gets uniform noise of width feature_noise * 512 / length, drawn anew; when
    judged, and at width 0, none."""
    draft = EagleConfig(feature_noise=0.2).build(tiny_target)
    seen: list[Tensor] = []
    first_state = draft.first_state
    monkeypatch.setattr(draft, "first_state", lambda x: seen.append(x) or first_state(x))
    for _ in range(2):
        list(draft.unroll(batch, 2, batch.loss_mask, backend))
    borders = batch.cu_seqlens.tolist()
    for start, end in zip(borders[:-1], borders[1:], strict=True):
        noise, width = (seen[0] - batch.features)[start:end], 0.2 * 512 / (end - start)
        assert 0.49 * width < float(noise.abs().max()) <= 0.5 * width + 1e-5
        assert abs(float(noise.mean())) < 0.05 * width
    assert not torch.equal(seen[0], seen[1])
    with torch.no_grad():
        list(draft.unroll(batch, 2, batch.loss_mask, backend))
    list(draft.eval().unroll(batch, 2, batch.loss_mask, backend))
    assert all(torch.equal(x, batch.features) for x in seen[2:]) and len(seen) == 4


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"norms": "some"}, "draft.norms=some is unknown; use restored or none"),
        ({"taps": ("layer.1", "final")}, "draft=eagle reads one tap, not 2; use draft=eagle3"),
        ({"feature_noise": -1.0}, "draft.feature_noise=-1.0 must be 0 or above"),
        ({"feature_noise": float("nan")}, "draft.feature_noise=nan must be 0 or above"),
    ],
)
def test_choices_that_are_not_are_refused(choice: dict[str, object], message: str) -> None:
    """A choice that cannot be is one line that names it and what may be chosen."""
    with pytest.raises(UserError, match=message):
        EagleConfig(**choice)  # pyright: ignore
