"""The order of turns: what is mended, what is cut, what drops the row, for both uses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtptrain.data.arrange import answered_turns, prompt_turns
from mtptrain.datasets.base import BadRow, DataSettings, DropRow
from mtptrain.types import Role, ToolCall, Turn

SETTINGS = DataSettings()
NAMES: dict[str, Role] = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def conversation(letters: str) -> list[Turn]:
    """One turn a letter, saying its role's letter and its place; `-` empties the turn before it."""
    turns: list[Turn] = []
    for at, letter in enumerate(letters):
        if letter == "-":
            turns[-1] = replace(turns[-1], content=" ")
        else:
            turns.append(Turn(NAMES[letter], f"{letter}{at}"))
    return turns


def asked(letters: str, settings: DataSettings = SETTINGS) -> tuple[str, set[str]]:
    changes: set[str] = set()
    turns = prompt_turns(conversation(letters), settings, changes)
    return " ".join(turn.content for turn in turns), changes


def answered(letters: str, settings: DataSettings = SETTINGS) -> tuple[str, set[str]]:
    changes: set[str] = set()
    turns = answered_turns(conversation(letters), settings, changes)
    return " ".join(turn.content for turn in turns), changes


@pytest.mark.parametrize(
    ("letters", "prompts", "given"),
    [
        ("ua", "u0", "u0 a1"),
        ("uaua", "u0 u2", "u0 a1 u2 a3"),
        ("suaua", "s0 u1 u3", "s0 u1 a2 u3 a4"),
        ("uatata", "u0", "u0 a1 t2 a3 t4 a5"),
        ("uatt", "u0", "u0 a1"),
        ("uattau", "u0", "u0 a1 t2 t3 a4"),
        ("s-ua", "u2", "u2 a3"),
        ("aua", "u1", "u1 a2"),
        ("satua", "s0 u3", "s0 u3 a4"),
        ("asaua", "s1 u3", "s1 u3 a4"),
        ("uau", "u0 u2", "u0 a1"),
        ("ssua", "s0\ns1 u2", "s0\ns1 u2 a3"),
        ("uua", "u0\nu1", "u0\nu1 a2"),
        ("uaau", "u0 u3", "u0 a1\na2"),
    ],
)
def test_a_conversation_for_both_uses(letters: str, prompts: str, given: str) -> None:
    """Prompts leave the answers out and end before a tool's; given answers end with the last of them."""
    assert asked(letters)[0] == prompts
    assert answered(letters)[0] == given


@pytest.mark.parametrize(
    ("letters", "change"),
    [
        ("s-ua", "an empty system turn"),
        ("aua", "before the user's first"),
        ("uua", "of one role in a row: joined"),
        ("uatau", "before the first answer of a tool"),
    ],
)
def test_a_change_is_recorded(letters: str, change: str) -> None:
    """In one word for every kind; a conversation that is taken as it is has none."""
    (found,) = asked(letters)[1]
    assert change in found
    assert not asked("suaua")[1] and not answered("suaua")[1]


def test_a_last_question_without_an_answer_is_cut_for_training_only() -> None:
    """For a target that answers it is one more question."""
    assert not asked("uau")[1]
    assert answered("uau")[1] == {"last turns without an answer cut off"}


def test_questions_that_nobody_answers_stay_apart() -> None:
    """Their answers are still to be written; joined, they would be one question."""
    assert asked("suuu") == ("s0 u1 u2 u3", set())


@pytest.mark.parametrize("letters", ["", "s", "a", "at", "sa", "u-", "uau-a", "s-"])
def test_a_row_without_a_question_is_bad(letters: str) -> None:
    """No user turn, or an empty one."""
    with pytest.raises(BadRow):
        asked(letters)
    with pytest.raises(BadRow):
        answered(letters)


def test_a_system_turn_in_the_middle_drops_the_row_unless_it_is_kept() -> None:
    """Whether it is rendered depends on the template."""
    for letters in ("uasua", "usua"):
        with pytest.raises(DropRow, match="middle"):
            asked(letters)
    assert asked("uasua", DataSettings(middle_system="keep"))[0] == "u0 s2 u3"


def test_one_role_in_a_row_drops_the_row_where_asked() -> None:
    """As data.same_role says; several tool turns answer several calls."""
    settings = DataSettings(same_role="drop")
    for letters in ("uua", "uaa", "ssua"):
        with pytest.raises(DropRow):
            answered(letters, settings)
    assert answered("uatta", settings)[0] == "u0 a1 t2 t3 a4"


def test_joined_answers_keep_their_calls_and_thoughts() -> None:
    """A text and the call after it are one answer."""
    call = ToolCall("f", "{}")
    turns = [
        Turn("user", "u"),
        Turn("assistant", "text", "first"),
        Turn("assistant", "", "then", (call,)),
    ]
    joined = answered_turns(turns, SETTINGS, set())
    assert joined[1] == Turn("assistant", "text", "first\nthen", (call,))


def test_no_answer_is_dropped_and_never_an_empty_mask() -> None:
    """Nothing given, or nothing said; a call without a text is an answer."""
    for letters, reason in (("u", "no answer"), ("suu", "no answer"), ("ua-", "empty")):
        with pytest.raises(DropRow, match=reason):
            answered(letters)
    call = Turn("assistant", "", tool_calls=(ToolCall("f", "{}"),))
    assert answered_turns([Turn("user", "u"), call], SETTINGS, set())[1] == call


def test_max_turns_cuts_both_uses_at_a_question() -> None:
    """The answers to the questions that stay are kept."""
    settings = DataSettings(max_turns=1)
    assert asked("suaua", settings)[0] == "s0 u1"
    text, changes = answered("suaua", settings)
    assert text == "s0 u1 a2" and changes == {"later turns cut off by data.max_turns"}
