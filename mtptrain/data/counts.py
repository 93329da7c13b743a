"""What became of every row: kept, kept and changed, or dropped, by reason, with the first example.

`rows == kept + dropped` at all times, so that nothing leaves without a word. A row that is kept may have
been changed for several reasons and counts once for each. It gives up a list of all the rows concerned:
the first of each reason is enough to look.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from mtptrain.datasets.base import RawRow


@dataclass(frozen=True)
class Tally:
    """How many rows had one reason, and where the first of them stands."""

    rows: int
    first: str


@dataclass
class Counts:
    """Filled in by the reader, row by row."""

    rows: int = 0
    kept: int = 0
    changed: dict[str, Tally] = field(default_factory=dict)
    dropped: dict[str, Tally] = field(default_factory=dict)

    def keep(self, row: RawRow, changes: set[str]) -> None:
        self.rows += 1
        self.kept += 1
        for reason in sorted(changes):
            _add(self.changed, reason, row.place)

    def drop(self, row: RawRow, reason: str) -> None:
        self.rows += 1
        _add(self.dropped, reason, row.place)

    def take_back(self, row: RawRow, reason: str) -> None:
        """Drops a row that was counted as kept."""
        self.kept -= 1
        _add(self.dropped, reason, row.place)

    def json_text(self) -> str:
        """The content of data.json."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def table(self, title: str) -> str:
        """Plain text: one line for the whole, one for each reason."""
        lines = [f"{title}: {self.rows:,} rows read, {self.kept:,} kept"]
        for name, table in (("changed", self.changed), ("dropped", self.dropped)):
            ordered = sorted(table.items(), key=lambda item: -item[1].rows)
            lines += [f"  {name} {t.rows:>9,}  {why} ({_first(t)})" for why, t in ordered]
        return "\n".join(lines)


def _add(table: dict[str, Tally], reason: str, place: str) -> None:
    held = table.get(reason)
    table[reason] = Tally(held.rows + 1, held.first) if held else Tally(1, place)


def _first(tally: Tally) -> str:
    return tally.first if tally.rows == 1 else f"first: {tally.first}"
