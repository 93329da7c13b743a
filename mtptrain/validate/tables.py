"""Figures and tables as people read them, in Markdown and in HTML."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from mtptrain.validate.acceptance import Interval

Row = tuple[str, ...]


def table(header: Row, rows: Iterable[Row]) -> str:
    """A Markdown table; what a cell holds does not break it."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def html_table(header: Row, rows: Iterable[Row]) -> str:
    """The same table in HTML."""
    lines = [_html_row("th", header), *(_html_row("td", row) for row in rows)]
    return "\n".join(["<table>", *lines, "</table>"])


def _html_row(tag: str, row: Row) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(text)}</{tag}>' for text in row)}</tr>"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def span(interval: Interval | None, digits: int = 3) -> str:
    return "[n/a]" if interval is None else f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def number(value: float | None, digits: int = 3) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"
