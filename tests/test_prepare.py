"""Prompts in, target-written answers out: turns, shards, resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.chat import Chat
from mtptrain.prepare import (
    Answer,
    PrepareSettings,
    answer_turns,
    answers_path,
    prepare_shards,
    read_answers,
)
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target
from mtptrain.types import Completion, Conversation, SamplingParams, Turn, UserError

GREEDY = SamplingParams(max_new_tokens=10)
SETTINGS = PrepareSettings(
    max_new_tokens=10, temperature=0.0, top_p=1.0, max_batch=8, shard_conversations=3
)


@pytest.fixture(scope="module")
def engine(tiny_target: Target, tiny_chat: Chat, backend: AttentionBackend) -> Engine:
    return Engine(tiny_target, backend, EngineLimits(max_batch=8), tiny_chat.eos_ids)


def _conversations(count: int = 7) -> list[Conversation]:
    """Every third one has two turns."""
    texts = ["Tell me a story", "Why is the sky blue?", "Sum up"]
    turns = [[Turn("user", f"{texts[i % 3]} {i}")] for i in range(count)]
    for more in turns[::3]:
        more.append(Turn("user", "And then?"))
    return [Conversation(f"c{i}", "all", tuple(t)) for i, t in enumerate(turns)]


def test_each_turn_is_asked_with_the_answers_before_it(tiny_chat: Chat, engine: Engine) -> None:
    """The second turn's prompt is the chat so far: first turn, the target's own answer as text, second turn."""
    done = answer_turns(_conversations(), tiny_chat, engine, GREEDY)
    by_id = {c.request.id: c for c in done}
    assert list(by_id) == [*(f"c{i}" for i in range(7)), "c0#1", "c3#1", "c6#1"]
    first, second = by_id["c3"], by_id["c3#1"]
    said = tiny_chat.text(first.output_ids)
    turns = [Turn("user", "Tell me a story 3"), Turn("assistant", said), Turn("user", "And then?")]
    assert second.request.prompt_ids == tiny_chat.prompt_ids(turns)
    assert first.request.prompt_ids == tiny_chat.prompt_ids(turns[:1])


def test_system_turns_stay_where_they_are(tiny_chat: Chat, engine: Engine) -> None:
    """A system turn is no turn to be answered; one behind the last user turn still reaches the prompt."""
    turns = (Turn("system", "Be brief."), Turn("user", "Hi"), Turn("system", "Now."))
    done = answer_turns([Conversation("c", "all", turns)], tiny_chat, engine, GREEDY)
    assert [c.request.prompt_ids for c in done] == [tiny_chat.prompt_ids(turns)]


def test_an_answers_sample_marks_what_the_target_wrote() -> None:
    """Prompt and answer in one row, the answer's tokens supervised."""
    sample = Answer("a", "qa", (1, 2, 3), (4, 5), "text", "eos").sample()
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
    assert sample.input_ids.dtype == torch.int64


def _prepare(
    folder: Path,
    chat: Chat,
    engine: Engine,
    settings: PrepareSettings = SETTINGS,
    on_shard: Callable[[int, list[Completion]], None] | None = None,
) -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    prepare_shards(_conversations(), folder, settings, chat, engine, 5, on_shard)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_answers_are_read_back_as_they_were_written(
    tiny_chat: Chat, engine: Engine, tmp_path: Path
) -> None:
    """Shards of three conversations in order, each turn an answer of its own."""
    _prepare(tmp_path, tiny_chat, engine)
    shards = read_answers(tmp_path)
    ids = [[a.id for a in shard] for shard in shards]
    assert ids == [["c0", "c1", "c2", "c0#1"], ["c3", "c4", "c5", "c3#1"], ["c6", "c6#1"]]
    alone = answer_turns(_conversations()[:3], tiny_chat, engine, GREEDY)
    assert [a.output_ids for a in shards[0]] == [c.output_ids for c in alone]
    assert [a.text for a in shards[0]] == [tiny_chat.text(c.output_ids) for c in alone]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shard_that_was_cut_short_is_written_again_bit_for_bit(
    temperature: float, tiny_chat: Chat, engine: Engine, tmp_path: Path
) -> None:
    """Whichever shards are missing, running again gives the bytes of an uninterrupted run, and answers only
    what is missing."""
    settings = PrepareSettings(10, temperature, 0.9, 8, 3)
    whole = _prepare(tmp_path / "whole", tiny_chat, engine, settings)
    assert len(whole) == 3
    for missing in ((1,), (0, 2)):
        for k in missing:
            answers_path(tmp_path / "whole", k).unlink()
        redone = dict[int, list[Completion]]()
        again = _prepare(tmp_path / "whole", tiny_chat, engine, settings, redone.__setitem__)
        assert again == whole and tuple(redone) == missing


def test_a_file_of_answers_means_that_all_of_its_shard_is_there(
    tiny_chat: Chat, engine: Engine, tmp_path: Path
) -> None:
    """Features are handed over first: where that fails, no answers file claims the shard."""

    def fail_at_one(shard: int, completions: list[Completion]) -> None:
        assert not answers_path(tmp_path, shard).exists()
        if shard == 1:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        _prepare(tmp_path, tiny_chat, engine, SETTINGS, fail_at_one)
    assert [p.name for p in tmp_path.iterdir()] == [answers_path(tmp_path, 0).name]


def test_no_answers_is_the_users_error(tmp_path: Path) -> None:
    """The message names the folder and the command to run."""
    with pytest.raises(UserError, match="holds no answers; run mtptrain prepare"):
        read_answers(tmp_path)


def test_text_with_unusual_line_ends_survives(tmp_path: Path) -> None:
    """An answer may hold U+2028 or a carriage return; its file has one line an answer all the same."""
    import json
    from dataclasses import asdict

    answer = Answer("a", "qa", (1,), (2,), "one\u2028two\u0085three\rfour\nfive", "eos")
    line = json.dumps(asdict(answer), ensure_ascii=False)
    answers_path(tmp_path, 0).write_text(line + "\n" + line + "\n", "utf-8", newline="")
    assert read_answers(tmp_path) == [[answer, answer]]
