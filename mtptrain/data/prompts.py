"""The prompts of a run: what is trained on and what is measured on, kept apart, with the record of both.

Training rows that share text with what is measured are refused, dropped or allowed, as `data.overlap`
says. A limit takes rows evenly over all that could be taken, which needs a first pass to count them; so
memory holds the rows that are used and no more. It gives up more: without a limit every prompt is held.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from mtptrain.data.counts import Counts
from mtptrain.data.overlap import HeldOut, Match
from mtptrain.data.reader import Accept, answered_of, prompts_of, read_conversations, read_rows
from mtptrain.datasets.base import EXAMPLE, DataSettings, DropRow, RawRow, evenly
from mtptrain.datasets.files import SUFFIXES
from mtptrain.datasets.hub import is_hub_name
from mtptrain.run import atomic_write, data_file
from mtptrain.types import Conversation, Sample, UserError

Row = TypeVar("Row", bound=Conversation | Sample, covariant=True)


class Read(Protocol[Row]):
    """`prompts_of` or `answered_of`."""

    def __call__(
        self,
        rows: Iterable[RawRow],
        settings: DataSettings,
        counts: Counts,
        accept: Accept | None = None,
    ) -> Iterator[tuple[RawRow, Row]]: ...


log = logging.getLogger("mtptrain")
LIMITED = "left out by the limit"
SHARED = "shares its first question, or eight words in a row, with data.eval_path"
NAMED = 3  # rows that a refusal names


def training_prompts(
    settings: DataSettings,
    held: Sequence[Conversation],
    record: Path | None,
    accept: Accept | None = None,
) -> list[Conversation]:
    """`data.path` without what is `held` out or not accepted; counts go to the log and to `record`, if any.

    Raises UserError.
    """
    return _training(prompts_of, settings, held, record, accept)


def training_answers(
    settings: DataSettings, held: Sequence[Conversation], record: Path | None
) -> list[Conversation | Sample]:
    """`training_prompts` of rows whose answers are given; a Sample where one is tokenised already."""
    return _training(answered_of, settings, held, record, None)


def _training(
    read: Read[Row],
    settings: DataSettings,
    held: Sequence[Conversation],
    record: Path | None,
    accept: Accept | None,
) -> list[Row]:
    source, out, counts = locate(settings.path, "data.path"), HeldOut(held), Counts()
    if settings.overlap == "drop":
        accept = _unshared(out, accept)
    rows: list[Row] = []
    shared: list[str] = []
    for raw, row in _taken(read, source, settings, settings.limit, counts, accept):
        rows.append(row)
        if settings.overlap != "refuse" or not isinstance(row, Conversation):
            continue
        if match := out.match(row):
            shared.append(_named(raw, row, match))
    _record(source, counts, record)
    if shared:
        raise UserError(_refusal(shared, len(rows), settings))
    return rows


def evaluation_prompts(
    settings: DataSettings, record: Path | None, accept: Accept | None = None
) -> list[Conversation]:
    """`data.eval_path`, duplicates and all: a benchmark is measured as it stands, but for rows that are not
    accepted, which are counted. Raises UserError."""
    source, counts = locate(settings.eval_path, "data.eval_path"), Counts()
    settings = replace(settings, duplicates="keep")
    taken = _taken(prompts_of, source, settings, settings.eval_limit, counts, accept)
    rows = [row for _, row in taken]
    _record(source, counts, record)
    return rows


def read_prompts(source: Path | str, settings: DataSettings | None = None) -> list[Conversation]:
    """Every prompt, without a record. Raises UserError, also where there is none."""
    counts = Counts()
    rows = list(read_conversations(source, settings or DataSettings(), counts))
    _refuse_none(source, counts)
    return rows


def locate(path: str, key: str) -> Path | str:
    """The file or folder that `key=path` names, else the name of a hub data set (text)."""
    try:
        return data_file(path, key)
    except UserError:
        if is_hub_name(path) and not path.endswith(SUFFIXES):
            return path
        raise


def _taken(
    read: Read[Row],
    source: Path | str,
    settings: DataSettings,
    limit: int | None,
    counts: Counts,
    accept: Accept | None = None,
) -> Iterator[tuple[RawRow, Row]]:
    """The rows of `evenly(all of them, limit)`."""
    if not limit:
        yield from read(read_rows(source), settings, counts, accept)
        return
    total = sum(1 for _ in read(read_rows(source), settings, Counts(), accept))
    wanted = set(evenly(range(total), limit))
    rows = read(read_rows(source), settings, counts, accept)
    for number, (raw, row) in enumerate(rows):
        if number in wanted:
            yield raw, row
        else:
            counts.take_back(raw, LIMITED)


def _unshared(out: HeldOut, also: Accept | None) -> Accept:
    def accept(row: Conversation) -> None:
        if also is not None:
            also(row)
        if out.match(row):
            raise DropRow(SHARED)

    return accept


def _named(raw: RawRow, row: Conversation, match: Match) -> str:
    what = "the same first question" if match.words is None else repr(match.words)
    return f"{raw.unit} {raw.number} (id {row.id[:40]!r}) with {match.held_id[:40]!r}: {what}"


def _refusal(shared: list[str], rows: int, settings: DataSettings) -> str:
    more = f"; and {len(shared) - NAMED:,} more" if len(shared) > NAMED else ""
    return (
        f"data.path={settings.path} shares text with data.eval_path={settings.eval_path} in "
        f"{len(shared):,} of {rows:,} rows: {'; '.join(shared[:NAMED])}{more}. Leave such rows out "
        f"with data.overlap=drop, or train on them all the same with data.overlap=allow"
    )


def _record(source: Path | str, counts: Counts, record: Path | None) -> None:
    if record is not None:
        atomic_write(record, counts.json_text())
    for line in counts.table(str(source)).split("\n"):
        log.info("%s", line)
    _refuse_none(source, counts)


def _refuse_none(source: Path | str, counts: Counts) -> None:
    if not counts.rows:
        raise UserError(
            f"{source} holds no prompts; write one JSON object a line, such as {EXAMPLE}"
        )
    if not counts.kept:
        reason, tally = max(counts.dropped.items(), key=lambda item: item[1].rows)
        raise UserError(
            f"{source} holds no prompts that can be used: all {counts.rows:,} rows were dropped, "
            f"{tally.rows:,} for {reason!r} (first: {tally.first}); give other rows or settings"
        )
