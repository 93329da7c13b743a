"""Medusa heads: what they start as, what they need of the target, and the choices they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.folder import contract
from mtptrain.drafts.medusa import MedusaConfig
from mtptrain.targets.base import Target
from mtptrain.types import Completion, UserError
from mtptrain.validate.simulated import pack


@pytest.mark.parametrize("tap", ["final", "final_prenorm"])
def test_every_head_starts_as_the_targets_next_token(
    tap: str,
    tiny_target: Target,
    backend: AttentionBackend,
    answers: list[Completion],
    document: Callable[..., tuple[Tensor, ...]],
) -> None:
    """Blocks start at zero, and a tap in front of the final norm is normed as the target does: each head says
    what the target says of the same row."""
    batch = pack([document(c, (tap,)) for c in answers[:2]])  # pyright: ignore
    draft = MedusaConfig(taps=(tap,), num_heads=3, num_blocks=2).build(tiny_target)
    with torch.no_grad():
        steps = list(draft.unroll(batch, 3, batch.loss_mask, backend))
    for i, step in enumerate(steps):
        expected = batch.final[step.label_rows - 2 - i]
        torch.testing.assert_close(step.states, expected, atol=1e-5, rtol=1e-5)
        said = F.linear(step.states, draft.head_rows()).argmax(-1)
        assert torch.equal(said, tiny_target.greedy(expected)) and len(said)


def test_it_needs_no_pages_and_no_embedding(tiny_target: Target) -> None:
    """It adds no layer to the pool, drafts at most a token a head, and its contract shares `lm_head` alone."""
    draft = MedusaConfig(num_heads=3).build(tiny_target)
    assert draft.num_kv_layers == 0 and draft.max_draft_tokens == 3 and draft.shares_prefix
    promise = contract(draft, tiny_target, "f", "t", "k", "strip")
    assert promise.concat_order == ("feature",) and promise.position_rule == "none"
    assert set(promise.shared) == {"lm_head"}


def test_heads_are_apart(tiny_target: Target) -> None:
    """Each head has blocks of its own: num_heads * num_blocks maps of H * H with bias, and nothing else."""
    draft = MedusaConfig(num_heads=3, num_blocks=2).build(tiny_target)
    assert sum(p.numel() for p in draft.parameters()) == 3 * 2 * (64 * 64 + 64)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"num_heads": 0}, "draft.num_heads=0 must lie in 1 to 64"),
        ({"num_blocks": 65}, "draft.num_blocks=65 must lie in 1 to 64"),
        ({"taps": ("layer.1", "final")}, "draft=medusa reads one tap, not 2; name one"),
    ],
)
def test_choices_that_are_not_are_refused(choice: dict[str, object], message: str) -> None:
    """A choice that cannot be is one line that names it and what may be chosen."""
    with pytest.raises(UserError, match=message):
        MedusaConfig(**choice)  # pyright: ignore
