"""Rows of every kind of file, alike; what cannot be read is named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from mtptrain.datasets import files
from mtptrain.datasets.base import BadRow
from mtptrain.datasets.files import file_rows
from mtptrain.types import UserError

ROWS = [
    {"id": "a", "turns": ["one\u2028two\u0085three", "naïve 😀"]},
    {"id": "b", "turns": []},
    {"id": "c", "turns": ["next"]},
]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()
ARRAY = json.dumps(ROWS, ensure_ascii=False, indent=1).encode()


def _parquet(folder: Path) -> bytes:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "made", row_group_size=2)
    content = (folder / "made").read_bytes()
    (folder / "made").unlink()
    return content


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz", "a.parquet", "a.txt", "lines.json"]
)
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    """Lines, an array (or lines) in .json, either packed, and parquet in several row groups."""
    content = ARRAY if name.startswith("a.json") and "jsonl" not in name else LINES
    content = _parquet(tmp_path) if name.endswith(".parquet") else content
    content = gzip.compress(content) if name.endswith(".gz") else content
    path = tmp_path / name
    path.write_bytes(content)
    rows = list(file_rows(path))
    assert [row.value for row in rows] == ROWS
    assert [row.number for row in rows] == [1, 2, 3]
    assert rows[2].place in (f"{path} line 3", f"{path} row 3")


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    """Also those in folders below; hidden files and files of other kinds are none."""
    for name in ("b.jsonl", "a/z.json", ".cache/x.jsonl", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps([name] if name.endswith(".json") else name))
    assert [row.value for row in file_rows(tmp_path)] == ["a/z.json", "b.jsonl"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_byte_order_mark_and_blank_lines_are_skipped(name: str, tmp_path: Path) -> None:
    """They count as lines, so that the place of a row is the one an editor shows."""
    text = (
        '\ufeff\r\n{"a": 1}\r\n\n  \n{"a": 2}\n' if name == "a.jsonl" else "\ufeff\n [1,\n\n2] \n"
    )
    (tmp_path / name).write_bytes(text.encode())
    numbers = [row.number for row in file_rows(tmp_path / name)]
    assert numbers == ([2, 5] if name == "a.jsonl" else [1, 2])


def test_a_bad_line_does_not_hide_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fault is the row's value: not JSON, not UTF-8, too long, nested too deeply."""
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 300_000)
    bad = [b"{1}", b'"\xff"', b'"' + b"x" * 1_000_000 + b'"', b"[" * 200_000, b'"good"']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(bad))
    *faults, good = [row.value for row in file_rows(tmp_path / "a.jsonl")]
    reasons = [fault.reason for fault in faults if isinstance(fault, BadRow)]
    assert good == "good"
    expected = ("not JSON", "not be read as UTF-8", "longer than", "nested too deeply")
    assert all(e.split()[-1] in r for e, r in zip(expected, reasons, strict=True))


ARRAYS = {
    "two values without a comma": '[{"a": 1} {"a": 2}]',
    "cut short": '[{"a": 1}, {"a": 2',
    "cut inside a string": '[{"a": 1}, {"a": "xyz',
    "no end": '[{"a": 1}',
    "a comma too many": '[{"a": 1},]',
    "something behind": '[{"a": 1}] [',
    "an integer of five thousand digits": '[{"a": 1}, ' + "1" * 5000 + "]",
    "a list a hundred thousand deep": '[{"a": 1}, ' + "[" * 100_000,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_bad_array_is_named_with_its_row(name: str, tmp_path: Path) -> None:
    """What stands before the fault is read; nothing behind it can be."""
    (tmp_path / "a.json").write_text(ARRAYS[name])
    rows = file_rows(tmp_path / "a.json")
    assert next(rows).value == {"a": 1}
    with pytest.raises(UserError, match=r"a\.json row \d is not JSON") as caught:
        list(rows)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_an_array_is_cut_anywhere(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that end where a piece of the file ends: numbers, words, escapes, wide characters."""
    monkeypatch.setattr(files, "CHUNK", chunk)
    values = [123456, -1.5e-7, True, None, 'é😀\\"\n', {"k": [1, {"z": "\u2028"}]}, [], "", 0]
    for text in (
        json.dumps(values),
        json.dumps(values, ensure_ascii=False, indent=3),
        "[]",
        " [ ] ",
    ):
        (tmp_path / "a.json").write_bytes(text.encode())
        expected = values if len(text) > 9 else []
        monkeypatch.setattr(files.io, "BufferedReader", _Unbuffered)
        assert [row.value for row in file_rows(tmp_path / "a.json")] == expected


class _Unbuffered:
    """Reads what it is asked for and no more, so that pieces are as small as `CHUNK` says."""

    def __init__(self, raw: files.BinaryIO, _size: int) -> None:
        self._raw, self.read = raw, raw.read

    def peek(self) -> bytes:
        start = self._raw.read(9)
        self._raw.seek(0)
        return start


def test_an_error_in_an_array_does_not_read_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault far from the end of what was read is a fault, not a value that goes on."""
    monkeypatch.setattr(files, "CHUNK", 1000)
    (tmp_path / "a.json").write_text("[{]" + " " * 5_000_000)
    sizes: list[int] = []
    more = files._Window._more
    monkeypatch.setattr(files._Window, "_more", lambda self: (sizes.append(1), more(self))[1])
    with pytest.raises(UserError):
        list(file_rows(tmp_path / "a.json"))
    assert len(sizes) <= 2


def test_an_endless_string_in_an_array_ends_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost quote does not load the file."""
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 10_000)
    monkeypatch.setattr(files, "CHUNK", 1000)
    (tmp_path / "a.json").write_text('["' + "x" * 5_000_000)
    with pytest.raises(UserError, match="Unterminated string"):
        list(file_rows(tmp_path / "a.json"))


def _broken(kind: str) -> bytes:
    packed = gzip.compress(LINES * 1000)
    return {
        "a.jsonl.gz": packed[: len(packed) // 2],
        "b.jsonl.gz": packed[:40] + bytes(40) + packed[80:],
        "c.jsonl.gz": LINES,
        "a.parquet": b"PAR1" + os.urandom(64) + b"\xff\xff\xff\x7fPAR1",
        "b.parquet": b"",
        "a.json": b'["\xff"]',
    }[kind]


@pytest.mark.parametrize(
    "name", ["a.jsonl.gz", "b.jsonl.gz", "c.jsonl.gz", "a.parquet", "b.parquet", "a.json"]
)
def test_a_broken_file_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    """Cut, damaged, not what its name says, with a header that lies about its length."""
    (tmp_path / name).write_bytes(_broken(name))
    with pytest.raises(UserError, match="cannot be read") as caught:
        list(file_rows(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    """One line each."""
    with pytest.raises(UserError, match="cannot be read"):
        list(file_rows(tmp_path / "missing.jsonl"))
    with pytest.raises(UserError, match="holds no data file"):
        list(file_rows(tmp_path))
