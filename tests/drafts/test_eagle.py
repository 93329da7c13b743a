"""The EAGLE head: its layout, and the choices it refuses."""

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
    eagle = EagleConfig(embedding_scale=0.3).build(tiny_target)
    mtp = MTPConfig(norms="none", embedding_scale=0.3).build(tiny_target)
    names = {name.replace("body.", "steps.0."): p for name, p in eagle.state_dict().items()}
    mtp.load_state_dict(names)
    pairs = zip(*(x.unroll(batch, 3, batch.loss_mask, backend) for x in (eagle, mtp)), strict=True)
    assert all(torch.equal(a.states, b.states) and len(a.states) for a, b in pairs)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"norms": "some"}, "draft.norms=some is unknown; use restored or none"),
        ({"taps": ("layer.1", "final")}, "draft=eagle reads one tap, not 2; use draft=eagle3"),
    ],
)
def test_choices_that_are_not_are_refused(choice: dict[str, object], message: str) -> None:
    """A choice that cannot be is one line that names it and what may be chosen."""
    with pytest.raises(UserError, match=message):
        EagleConfig(**choice)  # pyright: ignore
