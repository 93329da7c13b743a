"""Prompts in, target-written answers out, shard by shard; features are captured on the way.

The target answers through the runtime that later serves it, so a draft learns what it will be asked. A
conversation's second turn follows the target's own first answer; each turn becomes a sample of its own. The
unit of work is a shard of conversations with a fixed composition: one that was cut short is done again
from its beginning, bit for bit. It gives up the tail: at a shard's end the decode batch runs empty.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from mtptrain.chat import Chat
from mtptrain.progress import progress
from mtptrain.run import atomic_write
from mtptrain.runtime.engine import Engine
from mtptrain.types import (
    Completion,
    Conversation,
    Request,
    Sample,
    SamplingParams,
    Turn,
    UserError,
)

CHECKSUMS = "checksums.json"
TURN_SEED = 7919  # added per turn, so that the turns of a conversation are drawn independently


@dataclass(frozen=True)
class PrepareSettings:
    """How answers are written; from `prepare:` in the recipe."""

    max_new_tokens: int
    temperature: float
    top_p: float
    max_batch: int
    shard_conversations: int
    answers: Literal["target", "given"] = "target"  # given: those of the data, see given.py

    def __post_init__(self) -> None:
        if self.answers not in ("target", "given"):
            raise UserError(f"prepare.answers={self.answers} must be target or given")

    def sampling(self, seed: int) -> SamplingParams:
        return SamplingParams(
            self.temperature, top_p=self.top_p, max_new_tokens=self.max_new_tokens, seed=seed
        )


@dataclass(frozen=True)
class Answer:
    """One turn that the target wrote, or a conversation with given answers, as in an answers file."""

    id: str
    category: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    finish_reason: str
    gaps: tuple[tuple[int, int], ...] = ()  # ranges of output_ids that no target would write

    @property
    def written(self) -> int:
        """Tokens that the target wrote, or would write."""
        return len(self.output_ids) - sum(stop - start for start, stop in self.gaps)

    def sample(self) -> Sample:
        """All tokens, with the answer's marked as the target's own."""
        ids = torch.tensor(self.prompt_ids + self.output_ids)
        mask = torch.arange(len(ids)) >= len(self.prompt_ids)
        for start, stop in self.gaps:
            mask[len(self.prompt_ids) + start : len(self.prompt_ids) + stop] = False
        return Sample(self.id, self.category, ids, mask)


def answer_turns(
    conversations: Sequence[Conversation],
    chat: Chat,
    engine: Engine,
    params: SamplingParams,
    on_finish: Callable[[Completion], None] | None = None,
) -> list[Completion]:
    """Answers every user turn, turn by turn, all conversations of a turn in one batch.

    The id of turn k > 0 is `<conversation>#<k>`; an earlier answer enters the prompt as its text.
    """
    done: list[Completion] = []
    history = {c.id: list[Turn]() for c in conversations}
    pending = {c.id: list(c.turns) for c in conversations}
    turn = 0
    while live := [c for c in conversations if pending[c.id]]:
        requests = [_next_request(c, turn, pending[c.id], history[c.id], chat) for c in live]
        own_stream = replace(params, seed=params.seed + TURN_SEED * turn)
        answered = engine.generate(requests, own_stream, on_finish)
        for conversation, completion in zip(live, answered, strict=True):
            answer = Turn("assistant", chat.text(completion.output_ids))
            history[conversation.id].append(answer)
        done += answered
        turn += 1
    return done


def _next_request(
    conversation: Conversation, turn: int, pending: list[Turn], history: list[Turn], chat: Chat
) -> Request:
    """Moves turns up to the next user turn from `pending` to `history` and renders the prompt."""
    while pending:
        history.append(pending.pop(0))
        if history[-1].role == "user":
            break
    while pending and pending[0].role != "user":
        history.append(pending.pop(0))
    name = conversation.id if turn == 0 else f"{conversation.id}#{turn}"
    ids = chat.prompt_ids(history, conversation.tools)
    return Request(name, conversation.category, ids)


def prepare_shards(
    conversations: Sequence[Conversation],
    folder: Path,
    settings: PrepareSettings,
    chat: Chat,
    engine: Engine,
    seed: int,
    on_shard: Callable[[int, list[Completion]], None] | None = None,
) -> None:
    """Writes `answers-<k>.jsonl` for every shard that is not there yet.

    `on_shard` gets each new shard's completions, features included, before its answers file is written:
    a file that is there means that everything of its shard is.
    """
    size = settings.shard_conversations
    shards = [conversations[i : i + size] for i in range(0, len(conversations), size)]
    missing = missing_answers(conversations, folder, settings)
    turns = [sum(t.role == "user" for c in shard for t in c.turns) for shard in shards]
    before = sum(turns) - sum(turns[k] for k in missing)
    with progress("prepare", sum(turns), unit="answers", done=before) as bar:
        for k in missing:
            completions = answer_turns(
                shards[k], chat, engine, settings.sampling(seed + k), lambda _: bar.advance()
            )
            if on_shard is not None:
                on_shard(k, completions)
            write_answers(folder, k, [completion_answer(c, chat) for c in completions])


def write_answers(folder: Path, shard: int, answers: Sequence[Answer]) -> None:
    rows = [json.dumps(asdict(answer), ensure_ascii=False) for answer in answers]
    atomic_write(answers_path(folder, shard), "\n".join(rows) + "\n")


def missing_answers(
    conversations: Sequence[Conversation | Sample], folder: Path, settings: PrepareSettings
) -> list[int]:
    """The shards that have no answers file."""
    shards = range(-(-len(conversations) // settings.shard_conversations))
    return [k for k in shards if not answers_path(folder, k).exists()]


def answers_path(folder: Path, shard: int) -> Path:
    return folder / f"answers-{shard:05d}.jsonl"


def completion_answer(completion: Completion, chat: Chat) -> Answer:
    request = completion.request
    return Answer(
        request.id,
        request.category,
        request.prompt_ids,
        completion.output_ids,
        chat.text(completion.output_ids),
        completion.finish_reason,
    )


def seal_answers(folder: Path) -> None:
    """Writes `checksums.json`: the SHA-256 of every answers file."""
    sums = {path.name: _checksum(path) for path in sorted(folder.glob("answers-*.jsonl"))}
    atomic_write(folder / CHECKSUMS, json.dumps(sums, indent=1) + "\n")


def check_answers(folder: Path) -> None:
    """Raises UserError naming an answers file that is not as it was written."""
    try:
        sums = dict(json.loads((folder / CHECKSUMS).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{folder / CHECKSUMS} cannot be read ({error}); delete {folder} and prepare again"
        ) from None
    for path in sorted(folder.glob("answers-*.jsonl")):
        if _checksum(path) != sums.get(path.name):
            raise UserError(
                f"{path} is not as it was written; delete it and run again, it alone is prepared anew"
            )


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_answers(folder: Path) -> list[list[Answer]]:
    """Every shard's answers, in order. Raises UserError where there are none."""
    paths = sorted(folder.glob("answers-*.jsonl"))
    if not paths:
        raise UserError(
            f"{folder} holds no answers; run mtptrain prepare with the same settings first"
        )
    return [
        [_answer(line) for line in path.read_text("utf-8").split("\n") if line] for path in paths
    ]


def _answer(line: str) -> Answer:
    row = json.loads(line)
    row |= {key: tuple(row[key]) for key in ("prompt_ids", "output_ids")}
    return Answer(**(row | {"gaps": tuple((a, b) for a, b in row.get("gaps", ()))}))
