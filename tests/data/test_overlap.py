"""Training prompts that share text with what is measured."""

from __future__ import annotations

import random

import pytest

from mtptrain.data.overlap import HeldOut, Match
from mtptrain.types import Conversation, Turn


def row(*texts: str, system: str = "", name: str = "x") -> Conversation:
    front = (Turn("system", system),) if system else ()
    return Conversation(name, "all", front + tuple(Turn("user", text) for text in texts))


LONG = "Tell me why the sky turns red when the sun goes down in the evening"
HELD = HeldOut([row(LONG, "Why?", name="e1"), row("Hi there!", name="e2")])


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        (row("hi  THERE!"), Match("e2", None)),
        (row(LONG.upper()), Match("e1", None)),
        (row("Explain: WHY the sky, turns red; when the sun!"), Match("e1", "why the sky turns red when the sun")),
        (row("Other.", f"And now {LONG}"), Match("e1", "tell me why the sky turns red when")),
        (row("why the sky turns red when the rain falls"), None),
        (row("Other.", "Why?"), None),
        (row("Other.", "Hi there!"), None),
        (row("Other", system=LONG), None),
        (row("tell me why the sky", "turns red when the sun"), None),
    ],
)  # fmt: skip
def test_what_counts_as_shared(prompt: Conversation, match: Match | None) -> None:
    """The first question, or eight words in a row inside one turn of the user's; punctuation is none."""
    assert HELD.match(prompt) == match


def test_the_quick_way_finds_what_the_slow_way_finds() -> None:
    """Against every window of both, over a vocabulary so small that much is shared."""
    draw = random.Random(1)
    held = [[draw.choice("abcd") for _ in range(30)] for _ in range(20)]
    windows = {tuple(words[i : i + 8]) for words in held for i in range(23)}
    out = HeldOut([row(" ".join(words)) for words in held])
    for _ in range(300):
        words = [draw.choice("abcde") for _ in range(25)]
        slow = any(tuple(words[i : i + 8]) in windows for i in range(18))
        assert bool(out.match(row(" ".join(words)))) is slow


def test_nothing_held_out_matches_nothing() -> None:
    """Where overlap is allowed."""
    assert HeldOut([]).match(row("Hi")) is None
