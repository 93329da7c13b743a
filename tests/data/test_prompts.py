"""Prompts files: every known layout read alike, everything else named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtptrain.datasets.prompts import evenly, read_prompts
from mtptrain.run import recipes_dir
from mtptrain.types import Turn, UserError


def _write(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    lines = [x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


LAYOUTS = {
    "turns": {"turns": ["Hi", "And?"]},
    "messages": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "And?"},
        ]
    },
    "conversations": {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello"},
            {"from": "human", "value": "And?"},
        ]
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_alike(layout: str, tmp_path: Path) -> None:
    """The user's turns are kept in order; answers of another model are dropped, for the target writes its own."""
    (row,) = read_prompts(_write(tmp_path, {"id": 7, "category": "qa"} | LAYOUTS[layout]))
    assert row.id == "7" and row.category == "qa"
    assert row.turns == (Turn("user", "Hi"), Turn("user", "And?"))


def test_a_single_prompt_and_a_system_turn(tmp_path: Path) -> None:
    """`prompt` is one user turn; system and developer turns stay where they stood."""
    system = {
        "messages": [{"role": "developer", "content": "Be brief."}, *LAYOUTS["turns"]["turns"]]
    }
    one, two = read_prompts(_write(tmp_path, {"prompt": "Hi"}, system))
    assert one.turns == (Turn("user", "Hi"),) and one.category == "all"
    assert [t.role for t in two.turns] == ["system", "user", "user"]


def test_max_turns_keeps_the_first_user_turns(tmp_path: Path) -> None:
    """Later user turns go, and what follows them; the system turn in front stays."""
    roles = ("system", "user", "user", "user")
    messages = [{"role": r, "content": f"{r}{i}"} for i, r in enumerate(roles)]
    path = _write(tmp_path, {"messages": messages})
    assert [t.content for t in read_prompts(path, 1)[0].turns] == ["system0", "user1"]
    assert [t.content for t in read_prompts(path, 2)[0].turns] == ["system0", "user1", "user2"]
    assert len(read_prompts(path, 9)[0].turns) == 4


def test_ids_come_from_the_row_or_its_text(tmp_path: Path) -> None:
    """`id`, else `question_id`, else a hash of the line: the same in every run."""
    path = _write(tmp_path, {"question_id": 81, "prompt": "a"}, {"prompt": "b"})
    first, second = read_prompts(path)
    assert first.id == "81" and second.id == read_prompts(path)[1].id and len(second.id) == 16


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    """U+2028 and its like may stand inside a string; blank lines, CRLF and a byte-order mark are harmless."""
    path = tmp_path / "prompts.jsonl"
    rows = ['{"prompt": "one\u2028two\u0085three"}', "", '{"prompt": "next"}', "  "]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    assert [r.turns[0].content for r in read_prompts(path)] == ["one\u2028two\u0085three", "next"]


ERRORS = {
    "no json": ("{'prompt': 1}", "line 2 is not JSON"),
    "no object": ('["Hi"]', "line 2 has no text for the user's turn"),
    "no text": ({"id": 1}, "line 2 has no text for the user's turn"),
    "blank text": ({"prompt": "  "}, "line 2 has no text"),
    "no user turn": ({"messages": [{"role": "system", "content": "x"}]}, "line 2 has no text"),
    "unknown role": ({"messages": [{"role": "tool", "content": "x"}]}, "line 2 has no text"),
    "content is no text": ({"messages": [{"role": "user", "content": 3}]}, "line 2 has no text"),
    "empty list": ({"turns": []}, "line 2 has no text"),
    "the same id": ({"id": "a", "prompt": "y"}, "two rows with id 'a'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_row_that_is_not_understood_is_named(name: str, tmp_path: Path) -> None:
    """File, line and remedy in one line; no row is ever skipped."""
    row, message = ERRORS[name]
    path = _write(tmp_path, {"id": "a", "prompt": "x"}, row)
    with pytest.raises(UserError, match=message) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder, an empty file and one that is no UTF-8 are the user's errors."""
    missing, empty, binary = (tmp_path / name for name in ("missing", "empty", "binary"))
    empty.write_text("\n\n")
    binary.write_bytes(b'{"prompt": "\xff\xfe"}')
    for path, message in (
        (missing, "cannot be read"),
        (tmp_path, "cannot be read"),
        (empty, "holds no prompts"),
        (binary, "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            read_prompts(path)


@pytest.mark.parametrize("name", ["starter.jsonl", "starter_eval.jsonl"])
def test_the_starter_prompts_are_whole(name: str) -> None:
    """Both files read, in several categories, some with two turns."""
    rows = read_prompts(recipes_dir() / "prompts" / name)
    assert len(rows) >= 100 and len({r.category for r in rows}) > 5
    assert {len(r.turns) for r in rows} >= {1, 2}


def test_no_evaluation_prompt_is_trained_on() -> None:
    """The two starter files share no user turn."""
    train, held = (
        {t.content for r in read_prompts(recipes_dir() / "prompts" / f) for t in r.turns}
        for f in ("starter.jsonl", "starter_eval.jsonl")
    )
    assert not train & held


@pytest.mark.parametrize(
    ("count", "kept"),
    [
        (None, "abcdef"),
        (0, "abcdef"),
        (9, "abcdef"),
        (6, "abcdef"),
        (3, "ace"),
        (4, "abde"),
        (1, "a"),
    ],
)
def test_a_part_is_spread_evenly(count: int | None, kept: str) -> None:
    """Exactly as many as asked, in order; none or too many asked for is all."""
    assert evenly("abcdef", count) == list(kept)
