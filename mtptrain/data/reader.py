"""Rows to conversations, one at a time, each kept, changed or dropped for a reason that is counted.

One loop for every layout and for both uses: prompts, whose answers the target writes, and given answers,
which are trained on as they are. Nothing but two tables of 64 bits a row grows with the file. Duplicates
go before ids are compared, so that a row that is there twice is a duplicate and not a mistake. It gives
up parallel reading: one core reads faster than any target answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mtptrain.data.arrange import answered_turns, prompt_turns
from mtptrain.data.counts import Counts
from mtptrain.data.duplicates import HashSet, hash64, normalise
from mtptrain.datasets.base import BadRow, DataSettings, DropRow, RawRow, no_text, too_deep
from mtptrain.datasets.chats import chat_turns, has_text, tools_text
from mtptrain.datasets.files import file_rows
from mtptrain.datasets.hub import hub_rows
from mtptrain.datasets.oasst import gather_trees
from mtptrain.datasets.speed_bench import refuse_placeholders
from mtptrain.datasets.tokenised import is_tokenised, tokenised_sample
from mtptrain.types import Conversation, Sample, Turn, UserError

ID_KEYS = ("id", "question_id", "prompt_id", "uuid", "conversation_id")
DUPLICATE = "the same prompt as an earlier row"
Item = dict[str, object]
Row = TypeVar("Row")
Accept = Callable[[Conversation], None]  # raises DropRow for a row that the caller does not want


def read_rows(source: Path | str) -> Iterator[RawRow]:
    """Raw rows of a file, a folder, or (text) a hub data set. Raises UserError."""
    return gather_trees(hub_rows(source) if isinstance(source, str) else file_rows(source))


def read_conversations(
    source: Path | str, settings: DataSettings, counts: Counts
) -> Iterator[Conversation]:
    """Prompts for the target to answer. Raises UserError for the first bad row, unless those are skipped."""
    return (row for _, row in prompts_of(read_rows(source), settings, counts))


def read_answered(
    source: Path | str, settings: DataSettings, counts: Counts
) -> Iterator[Conversation | Sample]:
    """Conversations that end with a given answer; a Sample where the row is tokenised already."""
    return (row for _, row in answered_of(read_rows(source), settings, counts))


def prompts_of(
    rows: Iterable[RawRow], settings: DataSettings, counts: Counts, accept: Accept | None = None
) -> Iterator[tuple[RawRow, Conversation]]:
    """`read_conversations` of rows, each with its raw row; `accept` may refuse one more."""
    unique = _Unique(settings, counts, accept)

    def read(item: Item, changes: set[str]) -> Conversation:
        if is_tokenised(item) and not has_text(item):
            raise BadRow(
                "is tokenised already, so that the target cannot answer it", "give its text"
            )
        turns = prompt_turns(chat_turns(item, settings, changes), settings, changes)
        return unique.conversation(item, turns)

    return _accounted(rows, read, settings, counts)


def answered_of(
    rows: Iterable[RawRow], settings: DataSettings, counts: Counts, accept: Accept | None = None
) -> Iterator[tuple[RawRow, Conversation | Sample]]:
    """`read_answered` of rows, each with its raw row."""
    unique = _Unique(settings, counts, accept)

    def read(item: Item, changes: set[str]) -> Conversation | Sample:
        if is_tokenised(item):
            return unique.sample(item)
        turns = answered_turns(chat_turns(item, settings, changes), settings, changes)
        return unique.conversation(item, turns)

    return _accounted(rows, read, settings, counts)


def _accounted(
    rows: Iterable[RawRow],
    read: Callable[[Item, set[str]], Row],
    settings: DataSettings,
    counts: Counts,
) -> Iterator[tuple[RawRow, Row]]:
    for row in rows:
        changes: set[str] = set()
        try:
            found = read(_item(row.value), changes)
        except DropRow as dropped:
            counts.drop(row, str(dropped))
        except (BadRow, RecursionError) as error:
            bad = error if isinstance(error, BadRow) else too_deep()
            if not settings.skip_bad_rows:
                raise UserError(bad.line(row.place)) from None
            counts.drop(row, f"bad row: it {bad.reason}")
        else:
            counts.keep(row, changes)
            yield row, found


def _item(value: object) -> Item:
    if isinstance(value, BadRow):
        raise value
    if not isinstance(value, dict):
        raise no_text()
    refuse_placeholders(value)
    return value


class _Unique:
    """Gives every row its id, and refuses one whose prompt or id has been there."""

    def __init__(self, settings: DataSettings, counts: Counts, accept: Accept | None) -> None:
        self._settings, self._counts, self._accept = settings, counts, accept
        self._prompts, self._ids = HashSet(), HashSet()

    def conversation(self, item: Item, turns: tuple[Turn, ...]) -> Conversation:
        tools = tools_text(item)
        asked = [normalise(t.content) for t in turns if t.role in ("system", "user")]
        name = self._name(item, hash64([*asked, tools or ""]))
        row = Conversation(name, _category(item), turns, tools)
        if self._accept is not None:
            self._accept(row)
        return row

    def sample(self, item: Item) -> Sample:
        sample = tokenised_sample(item, "", _category(item))
        return replace(sample, id=self._name(item, hash64([str(item["input_ids"])])))

    def _name(self, item: Item, prompt: int) -> str:
        if not self._prompts.add(prompt) and self._settings.duplicates == "drop":
            raise DropRow(DUPLICATE)
        named = _given_id(item)
        name = named or f"{hash64([str(self._counts.rows), str(prompt)]):016x}"
        if not self._ids.add(hash(name) % 2**64):  # of this process only, and faster
            raise BadRow(
                "is the second of two rows with id",
                "make ids unique or leave them out",
                repr(name[:80]),
            )
        return name


def _given_id(item: Item) -> str | None:
    for key in ID_KEYS:
        if _is_name(value := item.get(key)):
            return str(value)
    return None


def _is_name(value: object) -> bool:
    return type(value) is int or (isinstance(value, str) and value != "")


def _category(item: Item) -> str:
    named = item.get("category")
    return str(named) if _is_name(named) else "all"
