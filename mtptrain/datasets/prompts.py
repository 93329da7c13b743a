"""Reads a prompts file: one JSON object a line, the user's turns under one of the field's usual keys.

`turns` (list of strings, Spec-Bench and MT-bench), `messages` or `conversations` (role/content or
from/value), `prompt` (one string). Assistant turns in a row are dropped: the target writes its own. Lines
are split at "\\n" only, since U+2028 may stand inside a string. It gives up other files and layouts for now:
a line that is not understood is an error that names it, never a skipped row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from mtptrain.types import Conversation, Turn, UserError

T = TypeVar("T")
ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}


def read_prompts(
    path: Path, max_turns: int | None = None, keep_answers: bool = False
) -> list[Conversation]:
    """Every row's system and user turns. Raises UserError naming file, line and remedy.

    `max_turns` keeps the first so many user turns of a conversation; `keep_answers` keeps the
    assistant turns too.
    """
    rows = [_conversation(path, number, text, keep_answers) for number, text in _lines(path)]
    if not rows:
        raise UserError(
            f"{path} holds no prompts; write one JSON object a line, such as {_EXAMPLE}"
        )
    ids = [row.id for row in rows]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise UserError(f"{path} has two rows with id {twice!r}; make ids unique or leave them out")
    return [_first_turns(row, max_turns) for row in rows] if max_turns else rows


def evenly(rows: Sequence[T], count: int | None) -> list[T]:
    """`count` rows spread evenly over all of them, in order; all where `count` is None, 0 or too large.

    A file sorted by category keeps every category that way.
    """
    if not count or count >= len(rows):
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


_EXAMPLE = '{"turns": ["What is a prime number?"]}'


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); give a UTF-8 file of JSON lines"
        ) from None


def _conversation(path: Path, number: int, text: str, keep_answers: bool) -> Conversation:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} line {number} is not JSON ({error}); correct or delete it"
        ) from None
    turns = _turns(row, keep_answers) if isinstance(row, dict) else None
    if not turns or not all(turn.content.strip() for turn in turns):
        raise UserError(
            f"{path} line {number} has no text for the user's turn; write it as {_EXAMPLE}"
        )
    name = row.get("id", row.get("question_id"))
    if name is None:
        name = hashlib.sha256(f"{number} {text}".encode()).hexdigest()[:16]
    return Conversation(str(name), str(row.get("category", "all")), turns)


def _turns(row: dict[str, Any], keep_answers: bool) -> tuple[Turn, ...] | None:
    """System and user turns, or all; None where there is no user turn or something is not text."""
    if isinstance(row.get("prompt"), str) and "turns" not in row and "messages" not in row:
        return (Turn("user", row["prompt"]),)
    for key in ("messages", "conversations", "turns"):
        if isinstance(row.get(key), list):
            turns = [_turn(item) for item in row[key]]
            kept = tuple(t for t in turns if t and (keep_answers or t.role != "assistant"))
            whole = None not in turns and any(t.role == "user" for t in kept)
            return kept if whole else None
    return None


def _turn(item: object) -> Turn | None:
    if isinstance(item, str):
        return Turn("user", item)
    if not isinstance(item, dict):
        return None
    role = ROLES.get(str(item.get("role", item.get("from"))))
    content = item["content"] if "content" in item else item.get("value")
    return Turn(role, content) if role and isinstance(content, str) else None


def _first_turns(row: Conversation, max_turns: int) -> Conversation:
    users = [i for i, turn in enumerate(row.turns) if turn.role == "user"]
    stop = users[max_turns] if len(users) > max_turns else len(row.turns)
    return Conversation(row.id, row.category, row.turns[:stop])
