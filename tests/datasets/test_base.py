"""Settings, faults of a row, and taking a part evenly."""

from __future__ import annotations

import pytest

from mtptrain.datasets.base import BadRow, DataSettings, evenly, parse_json
from mtptrain.types import UserError


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


@pytest.mark.parametrize(
    "setting",
    [
        {"unknown_role": "user"},
        {"same_role": "keep"},
        {"middle_system": 1},
        {"duplicates": None},
        {"overlap": "warn"},
        {"limit": -1},
        {"eval_limit": "ten"},
        {"max_turns": 1.5},
        {"limit": True},
    ],
)
def test_a_setting_that_is_none_is_named(setting: dict[str, object]) -> None:
    """Key, value and what is allowed, in one line."""
    (key,) = setting
    with pytest.raises(UserError, match=rf"^data\.{key}=") as caught:
        DataSettings(**setting)  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(caught.value)


HOSTILE = {
    "a list a hundred thousand deep": ("[" * 100_000, "nested too deeply"),
    "an integer of five thousand digits": ("1" * 5000, "is not JSON"),
    "half of a surrogate pair": (r'{"a": ["\ud83d"]}', "half of a surrogate pair"),
    "nothing": ("", "is not JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_a_bad_row(name: str) -> None:
    """Whatever Python's parser raises, and what it lets through that no encoder takes."""
    text, reason = HOSTILE[name]
    with pytest.raises(BadRow) as caught:
        parse_json(text)
    assert reason in caught.value.line("f line 1") and "\n" not in caught.value.line("f line 1")


def test_whole_surrogate_pairs_are_characters() -> None:
    """Escaped as json.dumps escapes them by default."""
    assert parse_json(r'"\ud83d\ude00"') == "\U0001f600"
