"""What a draft costs and gains at one batch size, measured side by side with the target alone.

The prompts are answered in groups of the batch, each group first by the target and then by both, so that a
machine that slows down slows both; prefill is left out on either side. What drafting costs is the time of a
decode step that went into proposing, over the time of one of the target's own steps. It gives up full
batches at the end of a group: its sequences end one after another, on either side alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtptrain.chat import Chat
from mtptrain.drafts.base import Draft
from mtptrain.prepare import answer_turns
from mtptrain.progress import progress
from mtptrain.runtime.engine import Engine
from mtptrain.types import Conversation, SamplingParams
from mtptrain.validate.replay import MakeEngine


@dataclass(frozen=True)
class SpeedAt:
    """Decode rates at one batch size; tokens a second are those that were kept."""

    batch_size: int
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float
    draft_cost: float  # time of proposing in a decode step, in decode steps of the target alone


@dataclass(frozen=True)
class DraftCost:
    """What a draft takes, whatever it gains."""

    parameters: int  # of its own; what it shares with the target is not counted
    cache_bytes_per_token: int
    speed: tuple[SpeedAt, ...]


def measure_cost(
    draft: Draft,
    conversations: Sequence[Conversation],
    chat: Chat,
    engine: MakeEngine,
    params: SamplingParams,
    batch_sizes: Sequence[int],
    num_draft_tokens: int,
) -> DraftCost:
    """Parameters, cache and, for each of `batch_sizes`, speed on the conversations' first turns."""
    first = [first_turn(c) for c in conversations]
    speed, row_bytes = [], 0
    for size in batch_sizes:
        alone, both = engine(size), engine(size, draft, num_draft_tokens)
        _take_turns(alone, both, first, chat, params, size)
        speed.append(_compared(size, alone, both))
        row_bytes = both.runner.draft_row_bytes
    parameters = sum(p.numel() for p in draft.parameters())
    return DraftCost(parameters, row_bytes, tuple(speed))


def first_turn(conversation: Conversation) -> Conversation:
    """What comes up to the first user turn, that turn included."""
    users = [i for i, turn in enumerate(conversation.turns) if turn.role == "user"]
    kept = conversation.turns[: users[0] + 1]
    return Conversation(conversation.id, conversation.category, kept, conversation.tools)


def _take_turns(
    alone: Engine,
    both: Engine,
    conversations: Sequence[Conversation],
    chat: Chat,
    params: SamplingParams,
    size: int,
) -> None:
    with progress(f"compare: speed at batch {size}", len(conversations), unit="answers") as bar:
        for start in range(0, len(conversations), size):
            group = conversations[start : start + size]
            requests = [c.request for c in answer_turns(group, chat, alone, params)]
            both.generate(requests, params)
            bar.advance(len(group))


def _compared(size: int, alone: Engine, both: Engine) -> SpeedAt:
    a, b = alone.times, both.times
    plain = a.decoded_tokens / max(a.decode_s, 1e-9)
    speculative = b.decoded_tokens / max(b.decode_s, 1e-9)
    target_step = a.decode_s / max(a.decode_steps, 1)
    draft_step = b.draft_s / max(b.decode_steps, 1)
    cost = draft_step / max(target_step, 1e-9)
    return SpeedAt(size, plain, speculative, speculative / max(plain, 1e-9), cost)
