"""OpenAssistant's trees, flat and nested: the best-ranked path, and trees that are none."""

from __future__ import annotations

from typing import Any

import pytest

from mtptrain.datasets import oasst
from mtptrain.datasets.base import BadRow, RawRow
from mtptrain.datasets.oasst import gather_trees


def message(name: str, parent: str | None, rank: Any = None, tree: str | None = "T", **more: Any):
    role = "prompter" if name[0] == "q" else "assistant"
    keys = {"message_id": name, "parent_id": parent, "text": f"text {name}", "role": role}
    return keys | {"rank": rank, "message_tree_id": tree} | more


TREE = [
    message("q1", None),
    message("a1", "q1", rank=2),
    message("a2", "q1", rank=0),
    message("q2", "a2", rank=1),
    message("q3", "a2", rank=0),
    message("a3", "q3"),
    message("a4", "q3", rank=5),
    message("a5", "q3", rank=-1, deleted=True),
]
BEST = ["q1", "a2", "q3", "a4"]


def gathered(*values: object) -> list[RawRow]:
    return list(gather_trees(RawRow("f", "line", i, v) for i, v in enumerate(values, 1)))


def names(row: RawRow) -> list[str]:
    assert isinstance(row.value, dict), row.value
    return [turn["content"].removeprefix("text ") for turn in row.value["messages"]]


def test_the_best_ranked_path_is_kept() -> None:
    """The lowest rank at every message, those without a rank last, deleted ones never."""
    (row,) = gathered(*TREE)
    assert names(row) == BEST and row.place == "f line 1"
    assert isinstance(row.value, dict) and row.value["id"] == "T"


def test_a_tree_in_one_row_reads_alike() -> None:
    """`prompt` with its replies, as the trees are published."""

    def nested(message: dict[str, Any]) -> dict[str, Any]:
        replies = [nested(m) for m in TREE if m["parent_id"] == message["message_id"]]
        return {k: message[k] for k in ("text", "role", "rank")} | {
            "replies": replies,
            "deleted": message.get("deleted", False),
        }

    (row,) = gathered({"message_tree_id": "T", "prompt": nested(TREE[0])})
    assert names(row) == BEST


def test_trees_and_other_rows_follow_each_other() -> None:
    """A tree ends where the next begins, or another layout; without tree ids at the next root."""
    other = {"prompt": "Hi"}
    u = [message("q8", None, tree="U"), message("a8", "q8", tree="U")]
    v = [message("q9", None, tree=None), message("a9", "q9", tree=None)]
    rows = gathered(*TREE, *u, other, *v, message("q7", None, tree=None))
    assert [names(r) if r.value != other else "other" for r in rows] == [
        BEST, ["q8", "a8"], "other", ["q9", "a9"], ["q7"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "rows",
    [
        [message("a1", "q1")],
        [message("q1", None), message("a1", "nobody")],
        [message("q1", "q1")],
    ],
)
def test_a_message_without_its_parent_is_a_bad_row(rows: list[dict[str, Any]]) -> None:
    """Rows of a tree have to stand together, parents first."""
    faults = [r.value for r in gathered(*rows) if isinstance(r.value, BadRow)]
    assert len(faults) == 1 and "answers a message" in faults[0].reason


def test_two_messages_of_one_id_do_not_go_round_for_ever() -> None:
    """A reply that has its own ancestor's id ends the path."""
    (row,) = gathered(message("q1", None), message("a1", "q1"), message("q1", "a1"))
    assert names(row) == ["q1", "a1"]


def test_a_tree_without_end_is_a_bad_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds one tree, and a tree is small."""
    monkeypatch.setattr(oasst, "MAX_MESSAGES", 10)
    (row,) = gathered(message("q0", None), *(message(f"a{i}", "q0") for i in range(50)))
    assert isinstance(row.value, BadRow) and "begins a tree" in row.value.reason
