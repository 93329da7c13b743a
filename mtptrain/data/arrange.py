"""The order of turns: what every template takes, once for prompts and once for given answers.

A conversation begins with at most one system turn, then the user; no role speaks twice in a row, for
Llama 2, Mistral and Gemma templates raise then. One exception: where nobody answers, the user's turns
are questions whose answers are still to be written. A rule that cannot mend a row drops it. It gives up
knowing the template: whether it renders a system turn in the middle is a setting.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from mtptrain.datasets.base import DataSettings, DropRow, no_text
from mtptrain.types import Turn

EMPTY_SYSTEM = "an empty system turn left out"
JOINED = "turns of one role in a row: joined"
LEADING = "turns before the user's first left out"
TRAILING = "last turns without an answer cut off"
LATER = "later turns cut off by data.max_turns"
FROM_TOOL = "cut before the first answer of a tool"
SAME_ROLE = "turns of one role in a row"
MIDDLE_SYSTEM = "a system turn in the middle"
NO_ANSWER = "no answer to train on"
EMPTY_ANSWER = "an answer is empty"
IN_TURN = ["user", "assistant"] * 16


def prompt_turns(turns: list[Turn], settings: DataSettings, changes: set[str]) -> tuple[Turn, ...]:
    """For a target that writes the answers itself: system and user turns, the given answers left out.

    What a tool said answers a call that the target may not make, so the row ends before it.
    """
    turns = _arranged(turns, settings, changes)
    spoken = list(takewhile(lambda turn: turn.role != "tool", turns))
    if len(spoken) < len(turns):
        changes.add(FROM_TOOL)
    asked = [turn for turn in spoken if turn.role != "assistant"]
    return tuple(_first_turns(asked, settings.max_turns, changes))


def answered_turns(
    turns: list[Turn], settings: DataSettings, changes: set[str]
) -> tuple[Turn, ...]:
    """For training on the answers that are given: everything up to the last answer."""
    turns = _first_turns(_arranged(turns, settings, changes), settings.max_turns, changes)
    while turns and turns[-1].role != "assistant":
        turns.pop()
        changes.add(TRAILING)
    answers = [turn for turn in turns if turn.role == "assistant"]
    if not answers:
        raise DropRow(NO_ANSWER)
    if not all(turn.tool_calls or not _is_blank(turn.content) for turn in answers):
        raise DropRow(EMPTY_ANSWER)
    return tuple(turns)


def _arranged(turns: list[Turn], settings: DataSettings, changes: set[str]) -> list[Turn]:
    if any(turn.role == "user" and _is_blank(turn.content) for turn in turns):
        raise no_text()
    if _in_order(turns):
        return turns
    turns = _from_the_user(_without_empty_system(turns, changes), changes)
    turns = _taking_turns(turns, settings, changes)
    if settings.middle_system == "drop":
        if any(turn.role == "system" for turn in turns[1:]):
            raise DropRow(MIDDLE_SYSTEM)
    return turns


def _in_order(turns: list[Turn]) -> bool:
    """Whether user and assistant speak in turn from the first on: most rows, which need no more looking at."""
    roles = [turn.role for turn in turns]
    return roles == IN_TURN[: len(roles)] and bool(roles)


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def _without_empty_system(turns: list[Turn], changes: set[str]) -> list[Turn]:
    said = [turn for turn in turns if turn.role != "system" or not _is_blank(turn.content)]
    if len(said) < len(turns):
        changes.add(EMPTY_SYSTEM)
    return said


def _from_the_user(turns: list[Turn], changes: set[str]) -> list[Turn]:
    """Without the answers that come before any question, which a split conversation begins with."""
    first = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        raise no_text()
    front = [turn for turn in turns[:first] if turn.role == "system"]
    if len(front) == first:
        return turns
    changes.add(LEADING)
    return front + turns[first:]


def _taking_turns(turns: list[Turn], settings: DataSettings, changes: set[str]) -> list[Turn]:
    answered = any(turn.role == "assistant" for turn in turns)
    joined: list[Turn] = []
    last = None
    for turn in turns:
        role = turn.role
        if role != last or role == "tool" or (role == "user" and not answered):
            joined.append(turn)  # several calls have several answers
            last = role
        elif settings.same_role == "drop":
            raise DropRow(SAME_ROLE)
        else:
            changes.add(JOINED)
            joined[-1] = _join(joined[-1], turn)
    return joined


def _join(first: Turn, second: Turn) -> Turn:
    def both(a: str | None, b: str | None) -> str:
        return "\n".join(text for text in (a, b) if text)

    return replace(
        first,
        content=both(first.content, second.content),
        reasoning=both(first.reasoning, second.reasoning) or None,
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _first_turns(turns: list[Turn], max_turns: int | None, changes: set[str]) -> list[Turn]:
    users = [i for i, turn in enumerate(turns) if turn.role == "user"]
    if not max_turns or len(users) <= max_turns:
        return turns
    changes.add(LATER)
    return turns[: users[max_turns]]
