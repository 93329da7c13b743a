"""Around training: the store is the target's, every weight moves, and what is trained is what is served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hidden_state_cache import FeatureStore
from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base import Draft, Draw, Proposal, TrueRows
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.targets.base import Target
from mtptrain.train.checks import check_served, check_teacher, footprints, unmoved
from mtptrain.train.data import TapColumns
from mtptrain.types import UserError


def test_the_teacher_of_the_store_is_the_target(
    store: FeatureStore, tiny_target: Target, backend: AttentionBackend
) -> None:
    final = TapColumns.of(store, ("final",)).final
    assert check_teacher(store, final, tiny_target, backend) < 1e-3


def test_features_from_before_the_norm_are_no_teacher(
    store: FeatureStore, tiny_target: Target, backend: AttentionBackend
) -> None:
    (before,) = TapColumns.of(store, ("final_prenorm",)).features
    with pytest.raises(UserError, match="does not fit.*capture again"):
        check_teacher(store, before, tiny_target, backend)


def test_a_tensor_that_training_left_alone_is_named() -> None:
    layer = torch.nn.Linear(3, 3)
    before = footprints(layer)
    assert unmoved(before, footprints(layer)) == ("weight", "bias")
    with torch.no_grad():
        layer.weight[0, 0] += 1e-4
    assert unmoved(before, footprints(layer)) == ("bias",)


def test_a_trained_head_serves_what_its_unroll_says(
    fit_head: Callable[..., Draft],
    tiny_target: Target,
    backend: AttentionBackend,
    store: FeatureStore,
) -> None:
    draft = fit_head(MTPConfig(taps=("layer.2",)))
    assert check_served(draft, tiny_target, backend, store, 3) > 20


def test_a_head_that_serves_something_else_is_found_out(
    fit_head: Callable[..., Draft],
    tiny_target: Target,
    backend: AttentionBackend,
    store: FeatureStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Features a row late, the field's commonest fault: the unroll never sees it, serving does."""
    draft = fit_head(MTPConfig(taps=("layer.2",)))
    honest = draft.propose

    def late(rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        object.__setattr__(rows, "features", rows.features.roll(1, 0))
        return honest(rows, num_draft_tokens, draw)

    monkeypatch.setattr(draft, "propose", late)
    with pytest.raises(RuntimeError, match="accepts otherwise"):
        check_served(draft, tiny_target, backend, store, 3)
