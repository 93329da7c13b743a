"""A large file needs no more memory than a small one: nothing but 64 bits a row stays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

# Prints by how many MB reading the second file raised the peak that reading the first had reached.
CODE = """
import resource, sys
from mtptrain.data.counts import Counts
from mtptrain.data.reader import read_answered
from mtptrain.datasets.base import DataSettings
from pathlib import Path

def peak(path):
    assert sum(1 for _ in read_answered(Path(path), DataSettings(), Counts())) > 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

small = peak(sys.argv[1])
print(peak(sys.argv[2]) - small)
"""
ANSWER = "A sentence of an answer that goes on for a while, naïvely. " * 100  # 6 kB
BATCH = 500


def _rows(count: int) -> Iterator[dict[str, object]]:
    for number in range(count):
        yield {"id": number, "prompt": f"Question {number}", "response": f"{number} {ANSWER}"}


def _write(path: Path, megabytes: float) -> Path:
    rows = _rows(int(megabytes * 1e6 / len(ANSWER)))
    if path.suffix == ".parquet":
        schema = pyarrow.schema({"id": "int64", "prompt": "string", "response": "string"})
        with parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as file:
            file.write_table(pyarrow.Table.from_pylist(list(rows), schema))  # one row group
        return path
    first, between, last = ("[", ",\n", "]") if path.suffix == ".json" else ("", "\n", "")
    with open(path, "w", encoding="utf-8") as file:
        file.write(first)
        for number, row in enumerate(rows):
            file.write((between if number else "") + json.dumps(row, ensure_ascii=False))
        file.write(last)
    return path


def _growth(folder: Path, suffix: str, megabytes: float) -> float:
    small = _write(folder / f"small{suffix}", 0.2)
    large = _write(folder / f"large{suffix}", megabytes)
    command = [sys.executable, "-c", CODE, str(small), str(large)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_memory_does_not_grow_with_the_file(suffix: str, tmp_path: Path) -> None:
    """30 MB, of which Python would make some 60, raise the peak by less than 15."""
    assert _growth(tmp_path, suffix, 30) < 15


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_memory_does_not_grow_with_a_large_file(suffix: str, tmp_path: Path) -> None:
    """200 MB, parquet in a single row group, raise the peak by less than 60."""
    assert _growth(tmp_path, suffix, 200) < 60
