"""Hostile rows (hypothesis): every row is kept, dropped and counted, or named in one line; no traceback.

Rows are built from the keys and values that the reader looks for, wrongly put together, and files from
bytes. What is kept must be fit for the next stage: text that encodes, turns in an order, calls that parse.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtptrain.data.counts import Counts
from mtptrain.data.reader import answered_of, prompts_of, read_answered, read_conversations
from mtptrain.datasets.base import CHOICES, DataSettings, RawRow
from mtptrain.datasets.chats import ANSWERS, CONTEXTS, LISTS, QUESTIONS, REASONING, ROLES
from mtptrain.datasets.oasst import gather_trees
from mtptrain.types import Conversation, Sample, UserError

FUZZ = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TEXTS = st.sampled_from(
    ["", " ", "Hi", "Hi there", "<think>x</think>y", "<think>", "{article}", "{}", "[]", "[{", "null",
     '{"name": "f", "arguments": "{}"}', "\x00", "\u2028", "é😀", "\\ud800", "1" * 5000]
) | st.text(max_size=8)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | TEXTS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ROLE = st.sampled_from([*map(str, ROLES), "narrator", "User"]) | JSON
CALL = st.fixed_dictionaries(
    {}, optional={"id": JSON, "name": TEXTS, "arguments": JSON, "function": JSON}
)
PART = st.fixed_dictionaries({}, optional={"type": st.just("text") | TEXTS, "text": JSON}) | JSON
TURN = (
    st.fixed_dictionaries(
        {},
        optional={
            "role": ROLE,
            "from": ROLE,
            "content": TEXTS | st.lists(PART, max_size=2) | JSON,
            "value": TEXTS | JSON,
            "tool_calls": st.lists(CALL, max_size=2) | JSON,
            "function_call": CALL | JSON,
            "tool_call_id": JSON,
            "name": JSON,
        }
        | dict.fromkeys(REASONING, JSON),
    )
    | st.builds(lambda role, text: {"role": role, "content": text}, ROLE, TEXTS)
    | JSON
)
IDS = st.lists(st.integers(-1, 3) | JSON, max_size=3)
NAME = st.sampled_from(["a", "b", "c", 1, None]) | JSON
ROW = (
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(LISTS, st.lists(TURN, max_size=4) | JSON)
        | dict.fromkeys((*QUESTIONS, *CONTEXTS, *ANSWERS, "text"), TEXTS | JSON)
        | dict.fromkeys(("id", "category", "message_id", "parent_id", "message_tree_id"), NAME)
        | dict.fromkeys(("input_ids", "loss_mask"), IDS | JSON)
        | dict.fromkeys(("system", "system_prompt", "src_id", "rank", "image", "deleted"), JSON)
        | {"tools": st.lists(CALL, max_size=2) | JSON, "generated_message": TURN},
    )
    | st.builds(lambda turns: {"messages": turns}, st.lists(TURN, max_size=5))
    | JSON
)
SETTINGS = st.builds(
    DataSettings,
    max_turns=st.none() | st.integers(0, 3),
    **{key: st.sampled_from(values) for key, values in CHOICES.items()},
)


def raw(values: list[Any]) -> list[RawRow]:
    return list(gather_trees(RawRow("f", "line", i, v) for i, v in enumerate(values, 1)))


def is_fit(row: Conversation | Sample) -> bool:
    """Whether the next stage can take the row."""
    if isinstance(row, Sample):
        return len(row.input_ids) == len(row.loss_mask) and bool(row.loss_mask.any())
    calls = [call for turn in row.turns for call in turn.tool_calls]
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    assert row.tools is None or isinstance(json.loads(row.tools), list)
    assert all(isinstance(turn.content, str) for turn in row.turns)
    repr(row).encode()
    roles = [turn.role for turn in row.turns]
    return "user" in roles and next(role for role in roles if role != "system") == "user"


def reads_or_says_why(rows: list[RawRow], data: DataSettings) -> None:
    for read in (prompts_of, answered_of):
        try:
            list(read(rows, data, Counts()))
        except UserError as error:
            assert "\n" not in str(error) and str(error).startswith("f line ")
        skipping = DataSettings(**{**vars(data), "skip_bad_rows": True})
        counts = Counts()
        kept = [row for _, row in read(rows, skipping, counts)]
        assert all(map(is_fit, kept))
        assert counts.kept == len(kept) and counts.rows == len(rows)
        assert counts.rows == counts.kept + sum(t.rows for t in counts.dropped.values())
        assert json.loads(counts.json_text())["kept"] == len(kept) and counts.table("f")


@settings(FUZZ, max_examples=1500)
@given(st.lists(ROW, min_size=1, max_size=4), SETTINGS)
def test_any_row_is_read_or_named(values: list[Any], data: DataSettings) -> None:
    """Both uses, every setting; with skip_bad_rows nothing stops, and the counts add up."""
    reads_or_says_why(raw(values), data)


@settings(FUZZ, max_examples=300)
@given(st.lists(st.lists(TURN, min_size=1, max_size=6), min_size=1, max_size=3), SETTINGS)
def test_any_list_of_turns_is_read_or_named(lists: list[Any], data: DataSettings) -> None:
    """The commonest layout, at greater length."""
    reads_or_says_why(raw([{"conversations": turns} for turns in lists]), data)


LINES = st.lists(ROW.map(json.dumps).map(str.encode) | st.binary(max_size=20), max_size=4)
FILE = LINES.map(b"\n".join) | LINES.map(lambda lines: b"[" + b",".join(lines) + b"]")
SUFFIXES = st.sampled_from([".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", ""])


@settings(FUZZ, max_examples=500)
@given(FILE, SUFFIXES, st.booleans(), st.booleans())
def test_any_file_is_read_or_named(content: bytes, suffix: str, pack: bool, skip: bool) -> None:
    """Bytes under any name, packed or not."""
    data = DataSettings(skip_bad_rows=skip)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"data{suffix}"
        path.write_bytes(gzip.compress(content) if pack else content)
        for read in (read_conversations, read_answered):
            try:
                assert all(map(is_fit, read(path, data, Counts())))
            except UserError as error:
                assert "\n" not in str(error) and str(path) in str(error)
