"""The one loop over rows: both uses, ids, duplicates, and the count of everything."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from mtptrain.data.counts import Counts
from mtptrain.data.reader import answered_of, prompts_of, read_answered, read_conversations
from mtptrain.datasets.base import DataSettings, RawRow
from mtptrain.types import Conversation, Sample, Turn, UserError

SETTINGS = DataSettings()
SKIP = DataSettings(skip_bad_rows=True)


def raw(*values: object) -> Iterable[RawRow]:
    return [RawRow("f", "line", number, value) for number, value in enumerate(values, 1)]


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": turns} | more


def test_one_row_for_both_uses() -> None:
    """The target's own answers, or those that are given; tools and category go along."""
    row = chat("Hi", "Hello", category="qa", tools=[{"name": "f"}], id=7)
    ((_, prompt),) = prompts_of(raw(row), SETTINGS, Counts())
    ((_, given),) = answered_of(raw(row), SETTINGS, Counts())
    assert prompt == Conversation("7", "qa", (Turn("user", "Hi"),), '[{"name": "f"}]')
    assert isinstance(given, Conversation)
    assert given.turns == (Turn("user", "Hi"), Turn("assistant", "Hello"))


def test_a_tokenised_row_is_a_sample_where_answers_are_given() -> None:
    """For a target that answers it is a bad row, unless its text is there as well."""
    row = {"id": "a", "input_ids": [1, 2], "loss_mask": [0, 1]}
    ((_, sample),) = answered_of(raw(row), SETTINGS, Counts())
    assert isinstance(sample, Sample) and sample.id == "a" and sample.input_ids.tolist() == [1, 2]
    with pytest.raises(UserError, match="f line 1 is tokenised already"):
        list(prompts_of(raw(row), SETTINGS, Counts()))
    ((_, prompt),) = prompts_of(raw(row | chat("Hi", "Hello")), SETTINGS, Counts())
    assert prompt.turns == (Turn("user", "Hi"),)


def test_a_duplicate_goes_before_ids_are_compared() -> None:
    """A row that is there twice is a duplicate; another prompt of the same id is a mistake."""
    counts = Counts()
    twice = [chat("Hi", id="a"), chat(" hi ", id="a"), chat("Hi", "Hello", id="b")]
    assert len(list(prompts_of(raw(*twice), SETTINGS, counts))) == 1
    assert (counts.rows, counts.kept) == (3, 1)
    with pytest.raises(UserError, match="f line 2 is the second of two rows with id 'a'"):
        list(prompts_of(raw(chat("Hi", id="a"), chat("Bye", id="a")), SETTINGS, Counts()))


def test_the_system_turn_and_the_tools_are_part_of_the_prompt() -> None:
    """The same question under another instruction is another prompt."""
    rows = [chat("Hi"), chat("Hi", system="Be brief."), chat("Hi", tools=[{"name": "f"}])]
    assert len(list(prompts_of(raw(*rows), SETTINGS, Counts()))) == 3


def test_ids_of_rows_without_one_differ_and_stay() -> None:
    """Also where the prompts are alike, and whatever rows were dropped on the way."""
    keep = DataSettings(duplicates="keep", skip_bad_rows=True)
    rows = [chat("Hi"), 3, chat("Hi"), chat("Hi", id=""), chat("Hi", id=None), chat("Hi", id=True)]
    ids = [row.id for _, row in prompts_of(raw(*rows), keep, Counts())]
    assert len(set(ids)) == 5
    assert ids == [row.id for _, row in prompts_of(raw(*rows), keep, Counts())]


def test_every_row_is_counted_once() -> None:
    """Kept or dropped, by reason, with the first place; changes only of rows that are kept."""
    answer = {"role": "assistant", "content": "x"}
    rows = [
        chat("a", "b"),
        {"messages": [answer, *chat("c", "d")["messages"]]},
        {"messages": [answer, *chat("A", "d")["messages"]]},  # changed, but a duplicate
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"prompt": 3},
        7,
        chat("e"),
    ]
    counts = Counts()
    assert len(list(answered_of(raw(*rows), SKIP, counts))) == 2
    assert (counts.rows, counts.kept) == (7, 2)
    assert sum(t.rows for t in counts.dropped.values()) == 5
    assert {reason: t.first for reason, t in counts.changed.items()} == {
        "turns before the user's first left out": "f line 2"
    }
    assert {reason: t.first for reason, t in counts.dropped.items()} == {
        "the same prompt as an earlier row": "f line 3",
        "a role that is not known": "f line 4",
        "bad row: it has no text": "f line 5",
        "bad row: it has no text for the user's turn": "f line 6",
        "no answer to train on": "f line 7",
    }
    assert json.loads(counts.json_text())["rows"] == 7
    assert counts.table("f").split("\n")[0] == "f: 7 rows read, 2 kept"
    assert len(counts.table("f").split("\n")) == 7


def test_speed_bench_as_parquet_is_read_once_it_is_filled_in(tmp_path: Path) -> None:
    """A placeholder stops the reading, with file and row."""
    rows = [
        {"category": "writing", "sub_category": "x", "turns": ["Hi", "And?"], "src_id": "1"},
        {"category": "rag", "sub_category": "y", "turns": ["Sum up {article}"], "src_id": "2"},
    ]
    path = tmp_path / "test.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    reading = read_conversations(path, SETTINGS, Counts())
    first = next(reading)
    assert first.category == "writing" and len(first.turns) == 2
    with pytest.raises(UserError, match=r"test\.parquet row 2 is a SPEED-Bench row"):
        next(reading)


def test_oasst_rows_are_read_as_conversations(tmp_path: Path) -> None:
    """One conversation a tree, with the tree's id."""
    keys = {"message_tree_id": "T", "lang": "en"}
    rows = [
        keys | {"message_id": "q", "parent_id": None, "text": "Hi", "role": "prompter"},
        keys | {"message_id": "a", "parent_id": "q", "text": "Hello", "role": "assistant", "rank": 0},
        {"id": "other", "prompt": "Bye", "response": "Bye"},
    ]  # fmt: skip
    path = tmp_path / "oasst.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_answered(path, SETTINGS, Counts())
    assert (first.id, second.id) == ("T", "other")
    assert isinstance(first, Conversation) and len(first.turns) == 2
