"""The cost of a draft: both sides answer the same first turns, in groups of the batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.chat import Chat
from mtptrain.drafts.base import Draft
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.drafts.ngram import NgramConfig
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target
from mtptrain.types import Conversation, Request, SamplingParams, Turn
from mtptrain.validate.replay import MakeEngine
from mtptrain.validate.speed import first_turn, measure_cost

ROWS = [
    Conversation(f"c{i}", "qa", (Turn("system", "Be brief."), Turn("user", text)))
    for i, text in enumerate(("Tell me th", "How can you t", "Sum up", "Why is", "Where"))
]


@pytest.fixture
def engine(tiny_target: Target, tiny_chat: Chat, backend: AttentionBackend) -> MakeEngine:
    def make(
        max_batch: int,
        draft: Draft | None = None,
        num_draft_tokens: int = 0,
        capture_taps: tuple[str, ...] = (),
    ) -> Engine:
        limits = EngineLimits(max_batch, num_draft_tokens=num_draft_tokens)
        return Engine(tiny_target, backend, limits, tiny_chat.eos_ids, draft, capture_taps)

    return make


def test_the_first_turn_ends_with_the_first_user() -> None:
    """Later turns, given answers and tools of the conversation stay out or in as they were."""
    turns = (*ROWS[0].turns, Turn("assistant", "No."), Turn("user", "Why?"))
    assert first_turn(Conversation("c", "qa", turns, "[]")) == Conversation(
        "c", "qa", ROWS[0].turns, "[]"
    )


def test_both_sides_answer_the_same(
    engine: MakeEngine,
    tiny_chat: Chat,
    fit_head: Callable[..., Draft],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Group after group, the target first; with a clock that ticks once a look, every figure is what it must be."""
    asked = list[tuple[bool, list[str]]]()
    honest, ticks = Engine.generate, count()

    def generate(self: Engine, requests: list[Request], *rest: object) -> object:
        asked.append((self.draft is not None, [r.id for r in requests]))
        return honest(self, requests, *rest)  # pyright: ignore

    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr("mtptrain.runtime.engine.perf_counter", lambda: float(next(ticks)))

    draft, params = fit_head(MTPConfig()), SamplingParams(max_new_tokens=12)
    cost = measure_cost(draft, ROWS, tiny_chat, engine, params, (2,), 3)
    groups = [["c0", "c1"], ["c2", "c3"], ["c4"]]
    assert asked == [(with_draft, group) for group in groups for with_draft in (False, True)]
    (at,) = cost.speed
    assert at.batch_size == 2 and at.speedup == at.speculative_tokens_per_s / at.plain_tokens_per_s
    assert at.draft_cost == 1  # a step of the target takes one tick, and so does a proposal
    assert cost.parameters == sum(p.numel() for p in draft.parameters()) > 0
    assert cost.cache_bytes_per_token == 2 * 2 * 16 * 4  # keys and values, heads, dimension, bytes


def test_a_lookup_has_no_weights_and_no_pages(
    engine: MakeEngine, tiny_target: Target, tiny_chat: Chat
) -> None:
    """Nothing but its own time."""
    draft, params = NgramConfig().build(tiny_target), SamplingParams(max_new_tokens=6)
    cost = measure_cost(draft, ROWS[:1], tiny_chat, engine, params, (1,), 3)
    assert (cost.parameters, cost.cache_bytes_per_token) == (0, 0)
    assert cost.speed[0].draft_cost > 0
