"""What every file of the shelf speaks: a raw row and its place, the two faults of a row, the settings.

A row that cannot be understood is a `BadRow`: an error that names file, line and remedy, or a counted
drop where the user said so. A row that is understood and that a rule leaves out is a `DropRow`: always
a counted drop. Both are raised without a place; the reader knows where it stands. It gives up finding
every fault of a file at once: the first bad row ends the reading.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from mtptrain.types import UserError

T = TypeVar("T")
EXAMPLE = '{"turns": ["What is a prime number?"]}'
CHOICES = {
    "unknown_role": ("drop", "assistant"),
    "same_role": ("join", "drop"),
    "middle_system": ("drop", "keep"),
    "duplicates": ("drop", "keep"),
    "overlap": ("refuse", "drop", "allow"),
}


class BadRow(Exception):
    """A row that cannot be understood. `reason` is one of few; `detail` is this row's own.

    Made anew for every row: an exception that is raised again keeps what it was raised through.
    """

    def __init__(self, reason: str, remedy: str, detail: object = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy
        self.detail = " ".join(str(detail).split())[:200]

    def line(self, place: str) -> str:
        what = f"{self.reason} {self.detail}".strip()
        return f"{place} {what}; {self.remedy}, or leave such rows out with data.skip_bad_rows=true"


class DropRow(Exception):
    """A row that a rule leaves out; its text is the reason."""


class RawRow(NamedTuple):
    """One row as it was found, and where."""

    file: str
    unit: Literal["line", "row"]
    number: int  # counted from 1
    value: object  # parsed JSON; a BadRow where it could not be parsed

    @property
    def place(self) -> str:
        return f"{self.file} {self.unit} {self.number}"


@dataclass(frozen=True)
class DataSettings:
    """What is read and how; `data:` in the recipe. Raises UserError for a value that is none."""

    path: str = ""
    eval_path: str = ""
    max_turns: int | None = None
    limit: int | None = None
    eval_limit: int | None = None
    max_tokens: int | None = None
    skip_bad_rows: bool = False
    unknown_role: Literal["drop", "assistant"] = "drop"
    same_role: Literal["join", "drop"] = "join"
    middle_system: Literal["drop", "keep"] = "drop"
    duplicates: Literal["drop", "keep"] = "drop"
    overlap: Literal["refuse", "drop", "allow"] = "refuse"
    thinking: str | bool = "strip"  # `template.thinking_mode` reads it

    def __post_init__(self) -> None:
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise UserError(
                    f"data.{key}={getattr(self, key)!r} is unknown; it takes {', '.join(allowed)}"
                )
        for key in ("max_turns", "limit", "eval_limit", "max_tokens"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 0):
                raise UserError(f"data.{key}={value!r} must be a whole number from 0, or null")


def too_deep() -> BadRow:
    return BadRow("is nested too deeply", "correct or delete it")


def no_text() -> BadRow:
    return BadRow("has no text for the user's turn", f"write it as {EXAMPLE}")


def parse_json(text: str, part: str = "") -> object:
    """What JSON text says. Raises BadRow (naming the `part` of the row) for text that is none, or that
    no encoder takes."""
    try:
        value = json.loads(text)
        if "\\u" in text and ("\\ud" in text or "\\uD" in text):  # half of a pair is no character
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise BadRow(f"has half of a surrogate pair{part}", "write whole characters") from None
    except RecursionError:
        raise too_deep() from None
    except ValueError as error:
        raise BadRow(f"is not JSON{part}", "correct or delete it", f"({error})") from None


def evenly(rows: Sequence[T], count: int | None) -> list[T]:
    """`count` rows spread evenly over all of them, in order; all where `count` is None, 0 or too large.

    A file sorted by category keeps every category that way.
    """
    if not count or count >= len(rows):
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]
