"""Rows of local files: .jsonl, .json (an array, or lines), either with .gz, .parquet, a folder of these.

Nothing is read whole: lines one by one, an array element by element, parquet batch by batch, so memory
is bounded by one row (at most MAX_ROW_BYTES). Lines are split at "\\n" only, since U+2028 and its like
may stand inside a string; blank lines and a byte-order mark are skipped. A bad line is handed on as the
row's value, for the next line can still be read; after a bad array element nothing can. It gives up
speed in arrays that do not start with "[" in the first buffer: they are read as lines, and fail.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from json.decoder import WHITESPACE  # pyright: ignore[reportAttributeAccessIssue]
from pathlib import Path
from typing import BinaryIO

from mtptrain.datasets.base import BadRow, RawRow, parse_json
from mtptrain.types import UserError

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
MAX_ROW_BYTES = 32 << 20  # no conversation is that long; a file without line breaks is
CHUNK = 1 << 20  # bytes read at a time
LONGEST_WORD = 16  # JSON's longest, -Infinity, and room: an error so near the end may be a cut
BATCH = 64  # parquet rows that are Python objects at a time


def file_rows(path: Path) -> Iterator[RawRow]:
    """Rows of a file, or of a folder's files in the order of their names. Raises UserError."""
    for file in _files(path):
        try:
            yield from _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{file} cannot be read ({reason}); give a whole file, as UTF-8 if it is JSON"
            ) from None


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [p for p in sorted(path.rglob("*")) if p.name.endswith(SUFFIXES) and p.is_file()]
    visible = [p for p in files if not any(n.startswith(".") for n in p.relative_to(path).parts)]
    if not visible:
        raise UserError(f"{path} holds no data file; put {', '.join(SUFFIXES)} files into it")
    return visible


def _json_rows(path: Path) -> Iterator[RawRow]:
    packed = path.suffix == ".gz"
    with open(path, "rb") as raw, gzip.open(raw) if packed else raw as plain:
        file = io.BufferedReader(plain, CHUNK)  # pyright: ignore[reportArgumentType]
        start = file.peek()
        if start.startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
            start = start[len(codecs.BOM_UTF8) :]
        named_json = path.name.removesuffix(".gz").endswith(".json")
        if named_json and start.lstrip().startswith(b"["):
            yield from _array_rows(str(path), file)
        else:
            yield from _line_rows(str(path), file)


def _line_rows(name: str, file: BinaryIO) -> Iterator[RawRow]:
    for number, line in enumerate(_lines(file), 1):
        if not line.isspace():
            yield RawRow(name, "line", number, _value(line))


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines; of one that is too long only the start, which is longer than MAX_ROW_BYTES."""
    while line := file.readline(MAX_ROW_BYTES + 1):
        rest = line
        while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_ROW_BYTES + 1)
        yield line


def _value(line: bytes) -> object:
    """What the line says, or the fault in it."""
    if len(line) > MAX_ROW_BYTES:
        return BadRow(f"is longer than {MAX_ROW_BYTES >> 20} MiB", "split or delete it")
    try:
        return _checked(line.decode())
    except UnicodeDecodeError as error:
        return BadRow("cannot be read as UTF-8", "save the file as UTF-8", f"({error})")


def _checked(text: str) -> object:
    try:
        return parse_json(text)
    except BadRow as bad:
        return bad


def _array_rows(name: str, file: BinaryIO) -> Iterator[RawRow]:
    number = 0
    try:
        for number, value in enumerate(_elements(_Window(file)), 1):
            yield RawRow(name, "row", number, value)
    except (json.JSONDecodeError, RecursionError) as error:
        # without the place in the message, which is the piece's and not the file's
        reason = getattr(error, "msg", "nested too deeply")
        raise UserError(
            f"{name} row {number + 1} is not JSON ({reason}); correct the array there, or write one "
            f"row a line to a .jsonl file"
        ) from None


def _elements(window: _Window) -> Iterator[object]:
    window.take("[")
    if window.next_character() == "]":
        window.take("]")
    else:
        yield window.value()
        while window.next_character() == ",":
            window.take(",")
            yield window.value()
        window.take("]")
    window.take("")


class _Window:
    """A piece of a JSON file that moves on as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._text, self._at = file, "", 0
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._scan = json.JSONDecoder().raw_decode

    def next_character(self) -> str:
        """The next one that is no white space; empty at the end of the file."""
        while True:
            self._at = WHITESPACE.match(self._text, self._at).end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, character: str) -> None:
        """Passes the character, or the end where it is empty."""
        if self.next_character() != character:
            what = f"Expecting {character!r}" if character else "Extra data"
            raise json.JSONDecodeError(what, self._text, self._at)
        self._at += len(character)

    def value(self) -> object:
        """Passes a value. Where the piece ends inside it, the piece doubles, so that it takes linear time."""
        self.next_character()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._may_go_on(error) or not self._more():
                    raise
                continue
            except ValueError as error:  # an integer of thousands of digits
                raise json.JSONDecodeError(str(error), "", 0) from None
            if end > len(self._text) - 3 and self._more():
                continue  # a number may go on, as -1.5 does in -1.5e-7
            text, self._at = self._text[self._at : end], end
            return _checked(text) if "\\ud" in text or "\\uD" in text else value

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        open_end = error.msg.startswith("Unterminated string")
        near_end = error.pos >= len(self._text) - LONGEST_WORD
        return (open_end or near_end) and len(self._text) - self._at <= MAX_ROW_BYTES

    def _more(self) -> bool:
        """Lets go of what was passed and reads on; False, and nothing moves, at the end of the file."""
        data = self._file.read(max(CHUNK, len(self._text) - self._at))
        text = self._decode(data, not data)  # raises where the file ends inside a character
        if data:
            self._text, self._at = self._text[self._at :] + text, 0
        return bool(data)


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    import pyarrow  # here, since few runs need it
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path, buffer_size=CHUNK, pre_buffer=False) as file:
            for batch in file.iter_batches(BATCH):
                for value in batch.to_pylist():
                    number += 1
                    yield RawRow(str(path), "row", number, value)
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from None
