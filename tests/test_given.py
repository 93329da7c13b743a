"""Answers that the data gives: from rows to masked samples, to the store, without the target's own words."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hidden_state_cache import FeatureStore
from mtptrain import given
from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.chat import TOO_LONG, Chat
from mtptrain.cli import main
from mtptrain.prepare import answer_turns, answers_path, completion_answer, read_answers
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target
from mtptrain.types import Conversation, Sample, SamplingParams, Turn, UserError

ROWS = [
    Conversation(
        f"c{i}",
        "chat",
        (
            Turn("user", f"Say {i}"),
            Turn("assistant", f"It is {i}."),
            Turn("user", "And?"),
            Turn("assistant", "So."),
        ),
    )
    for i in range(5)
]
UNANSWERED = Conversation("q", "chat", (Turn("user", "Why?"),))


@pytest.mark.parametrize("text", ["..##..##", ".#", "#", "..###...", "#.#.#", ".##.#.."])
def test_an_answers_file_keeps_every_mask(text: str) -> None:
    """Prompt, answers, what stands between them and what stands behind."""
    mask = torch.tensor([char == "#" for char in text])
    sample = Sample("s", "chat", torch.arange(len(text)), mask)
    answer = given.given_answer(sample)
    assert answer.sample().loss_mask.tolist() == mask.tolist()
    assert answer.sample().input_ids.tolist() == sample.input_ids.tolist()
    assert answer.written == int(mask.sum())


def test_samples_are_read_back_as_the_chat_made_them(tiny_chat: Chat, tmp_path: Path) -> None:
    """Two conversations a shard, every answer supervised, and what was counted."""
    counts = given.write_given(ROWS, tmp_path, 2, tiny_chat)
    back = [a.sample() for shard in read_answers(tmp_path) for a in shard]
    for sample, row in zip(back, ROWS, strict=True):
        [made] = tiny_chat.sample(row)
        assert sample.id == row.id and sample.input_ids.tolist() == made.input_ids.tolist()
        assert sample.loss_mask.tolist() == made.loss_mask.tolist()
    assert len(read_answers(tmp_path)) == 3
    assert (counts[given.ROWS], counts[given.SAMPLES]) == (5, 5)
    assert counts[given.SUPERVISED] == sum(int(s.loss_mask.sum()) for s in back)


def test_the_targets_own_answers_given_back_are_the_same_samples(
    tiny_target: Target, tiny_chat: Chat, backend: AttentionBackend
) -> None:
    """Whichever way an answer came, its tokens and its mask are the same."""
    engine = Engine(tiny_target, backend, EngineLimits(), tiny_chat.eos_ids)
    asked = [replace(row, turns=row.turns[:1]) for row in ROWS]
    done = answer_turns(asked, tiny_chat, engine, SamplingParams(max_new_tokens=40))
    alike = 0
    for row, completion in zip(asked, done, strict=True):
        answer = completion_answer(completion, tiny_chat)
        ids = tiny_chat.tokenizer.encode(answer.text, add_special_tokens=False)
        if completion.finish_reason == "eos" and (*ids,) == answer.output_ids[:-1]:
            told = replace(row, turns=(*row.turns, Turn("assistant", answer.text)))
            [sample] = tiny_chat.sample(told)
            ours, length = answer.sample(), len(answer.sample().input_ids)
            assert torch.equal(sample.input_ids[:length], ours.input_ids)
            assert torch.equal(sample.loss_mask[:length], ours.loss_mask)
            assert not sample.loss_mask[length:].any()
            alike += 1
    assert alike


def test_a_shard_that_was_cut_short_is_written_again(tiny_chat: Chat, tmp_path: Path) -> None:
    """Whole shards are kept, the others done anew, and the counts are those of all."""
    whole = given.write_given(ROWS, tmp_path, 2, tiny_chat)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "masks-00001.json").unlink()
    answers_path(tmp_path, 2).unlink()
    (tmp_path / "masks-00002.json").unlink()
    assert given.write_given(ROWS, tmp_path, 2, tiny_chat) == whole
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_shard_without_samples_is_no_obstacle(tiny_chat: Chat, tmp_path: Path) -> None:
    """Rows without answers are counted; the rest is trained on."""
    counts = given.write_given([UNANSWERED, UNANSWERED, *ROWS], tmp_path, 2, tiny_chat)
    shards = [[a.id for a in shard] for shard in read_answers(tmp_path)]
    assert shards == [[], ["c0", "c1"], ["c2", "c3"], ["c4"]]
    assert counts["rows left out: no answer"] == 2
    assert json.loads((tmp_path / "masks-00000.json").read_text()) == {
        given.ROWS: 2,
        "rows left out: no answer": 2,
    }


def test_not_one_supervised_token_is_the_users_error(tiny_chat: Chat, tmp_path: Path) -> None:
    """The reasons are named, and what to do."""
    line = r"not one supervised token in 3 rows \(rows left out: no answer: 3\).*prepare.answers=target"
    with pytest.raises(UserError, match=line):
        given.write_given([UNANSWERED] * 3, tmp_path, 2, tiny_chat)
    with pytest.raises(UserError, match="not one supervised token in 0 rows"):
        given.require_supervised(Counter())


# ---- through the command line ---------------------------------------------------------------------------


@pytest.fixture
def words(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides that train on a file of given answers with the tiny target."""
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    lines = [
        {"id": c.id, "messages": [{"role": t.role, "content": t.content} for t in c.turns]}
        for c in ROWS
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    paths = {"target.path": tiny_folder, "data.path": file, "run_dir": tmp_path / "run"}
    return [
        *(f"{key}={path}" for key, path in paths.items()),
        "capture.dtype=fp32",
        "data.max_turns=9",
    ]


def test_capture_stores_given_answers_with_their_masks(words: list[str], tmp_path: Path) -> None:
    """The target writes nothing; features come by the separate pass, and answers that are not its greedy ones
    are no fault."""
    file = tmp_path / "chats.jsonl"
    file.write_text('{"prompt": "Why?"}\n{"prompt": "When?"}\n' + file.read_text())
    more = ["prepare.answers=given", "prepare.shard_conversations=2"]
    assert main(["capture", *words, *more]) == 0
    [folder] = (tmp_path / "cache" / "stores").iterdir()
    store = FeatureStore.open(folder / "features")
    assert [sample.id for sample in store] == [row.id for row in ROWS]
    assert all(sample.loss_mask.any() and not sample.loss_mask.all() for sample in store)
    assert store.identity.thinking == "strip"


def test_another_way_of_thinking_is_another_store(words: list[str], tmp_path: Path) -> None:
    """Nothing captured under one setting is ever read under another."""
    for mode in ("strip", "off", "on"):
        assert main(["capture", *words, "prepare.answers=given", f"data.thinking={mode}"]) == 0
    stores = [
        FeatureStore.open(folder / "features")
        for folder in (tmp_path / "cache" / "stores").iterdir()
    ]
    assert sorted(store.identity.thinking for store in stores) == ["off", "on", "strip"]


def test_long_samples_are_cut_before_capture(words: list[str], tmp_path: Path) -> None:
    """Each at `data.max_tokens`; a store of whole samples is another one."""
    assert main(["capture", *words, "prepare.answers=given"]) == 0
    assert main(["capture", *words, "prepare.answers=given", "data.max_tokens=40"]) == 0
    folders = (tmp_path / "cache" / "stores").iterdir()
    stores = [FeatureStore.open(folder / "features") for folder in folders]
    lengths = sorted(sorted({len(sample.input_ids) for sample in store}) for store in stores)
    assert lengths[0] == [40] and min(lengths[1]) > 40


def test_a_prompt_that_leaves_no_room_for_its_answer_is_left_out(
    words: list[str], tmp_path: Path
) -> None:
    """It is counted in data.json with its reason, and the others are answered."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Why?"}\n{"prompt": "%s"}\n' % ("so " * 60))
    more = [f"data.path={file}", "prepare.max_new_tokens=6", "data.max_tokens=60"]
    assert main(["prepare", *words, *more]) == 0
    counts = json.loads((tmp_path / "run" / "data.json").read_text())
    assert counts["kept"] == 1
    assert list(counts["dropped"]) == [TOO_LONG]
    assert counts["dropped"][TOO_LONG]["first"].endswith("prompts.jsonl line 2")


def test_inspect_data_marks_what_is_supervised(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three samples in brackets, then counts; nothing is written."""
    assert main(["inspect", "data", *words, "prepare.answers=given"]) == 0
    out = capsys.readouterr().out
    assert out.count("<|im_start|>assistant\n[It is ") == 3
    assert "[So.<|im_end|>]\n" in out and re.search(r"\s5  samples\n", out)
    assert not [p for name in ("run", "cache") for p in (tmp_path / name).rglob("*")]


def test_inspect_data_shows_prompts_while_nothing_is_answered(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers that the rows hold are not those of training: prompts are shown, and that the target's own are
    still to come."""
    assert main(["inspect", "data", *words]) == 0
    out = capsys.readouterr().out
    assert "It is 0." not in out and "the target has not answered yet" in out
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Why?"}\n')
    assert main(["inspect", "data", *words, f"data.path={file}"]) == 0
    out = capsys.readouterr().out
    assert "Why?<|im_end|>\n<|im_start|>assistant\n\n" in out and "[" not in out


def test_inspect_data_shows_the_targets_answers_once_they_are_written(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["prepare.max_new_tokens=6", "data.max_turns=1"]
    assert main(["prepare", *words, *more]) == 0
    capsys.readouterr()
    assert main(["inspect", "data", *words, *more]) == 0
    out = capsys.readouterr().out
    assert "<|im_start|>assistant\n[" in out and "not answered yet" not in out


def test_data_without_supervised_tokens_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """inspect, prepare and all: one line, exit code 2."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Why?"}\n')
    for verb in (["inspect", "data"], ["prepare"]):
        assert main([*verb, *words, f"data.path={file}", "prepare.answers=given"]) == 2
        assert "all 1 rows were dropped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("data.thinking=maybe", "data.thinking=maybe must be on, off or strip"),
        ("prepare.answers=mine", "prepare.answers=mine must be target or given"),
    ],
)
def test_settings_that_are_no_choice_are_named(
    word: str, line: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "data", *words, word]) == 2
    assert line in capsys.readouterr().err
