"""How fast rows become conversations, beside bare JSON parsing of the same lines.

Synthetic chats of some kB (several turns, code, quotes, characters beyond ASCII) are written once as
.jsonl, .json and packed; one thread reads them as prompts and as given answers. The reference is what
anyone would write by hand: `json.loads` of every line; ours adds the layout, the rules, duplicates and
the count. Rates are per second of CPU time, since the machine may be shared: median of the runs. It
gives up real data, which may not be copied here: name a file of your own with --data.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import bench

from mtptrain.data.counts import Counts
from mtptrain.data.overlap import HeldOut
from mtptrain.data.reader import read_answered, read_conversations
from mtptrain.datasets.base import DataSettings

LEAST = 50  # MB/s of JSONL on one core
MEGABYTES, QUICK_MEGABYTES = 40, 2
SETTINGS = DataSettings(skip_bad_rows=True)
PIECES = (
    "The quick answer is that it depends on the data, and on what is asked of it.\n",
    "```python\ndef area(r: float) -> float:\n    return 3.14159 * r ** 2\n```\n",
    'She said "yes", and then \\ (a backslash) was all that was left.\n',
    "Zürich, São Paulo and København are naïve choices – or are they?\n",
    "1. First, collect the rows.\n2. Then count them.\n3. Last, write the table.\n\n",
)


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--data", type=Path, help="a .jsonl file instead of synthetic chats")
    args = bench.begin(parser)
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder), args.data, QUICK_MEGABYTES if args.quick else MEGABYTES)
        rates = measure(files, args.runs)
    ours, bare = rates["given answers, .jsonl"], rates["json.loads alone, .jsonl"]
    rows = [(name, f"{rate:8.1f} MB/s") for name, rate in rates.items()]
    bench.table(f"reading on one core, MB of unpacked text (at least {LEAST})", rows)
    bench.finish(
        "read",
        ours,
        bare,
        "MB/s",
        threads=1,
        more={"least": LEAST, "mean_row_bytes": files.row_bytes},
    )


class Files:
    """The same rows as lines, as one array, and as packed lines."""

    def __init__(self, lines: Path, array: Path, packed: Path) -> None:
        self.lines, self.array, self.packed = lines, array, packed
        self.bytes = lines.stat().st_size
        with open(lines, "rb") as file:
            self.row_bytes = self.bytes // sum(1 for _ in file)


def make_files(folder: Path, data: Path | None, megabytes: int) -> Files:
    lines, array, packed = (folder / name for name in ("a.jsonl", "a.json", "a.jsonl.gz"))
    if data:
        shutil.copyfile(data, lines)
    else:
        write_chats(lines, int(megabytes * 1e6))
    with open(lines, "rb") as rows, open(array, "wb") as one, gzip.open(packed, "wb", 1) as small:
        for number, row in enumerate(rows):
            one.write((b",\n" if number else b"[") + row.rstrip(b"\n"))
            small.write(row)
        one.write(b"]")
    return Files(lines, array, packed)


def write_chats(path: Path, size: int) -> None:
    """Chats of two to eight turns; a question has one or two pieces, an answer 8 to 24."""
    draw = random.Random(0)
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        for number in range(size):
            turns = []
            for _ in range(draw.randint(1, 4)):
                question = f"{draw.random()} " + "".join(draw.choices(PIECES, k=draw.randint(1, 2)))
                answer = "".join(draw.choices(PIECES, k=draw.randint(8, 24)))
                turns += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            row = {"id": f"chat_{number}", "conversations": turns}
            written += file.write(json.dumps(row, ensure_ascii=number % 2 == 0) + "\n")
            if written >= size:
                return


def measure(files: Files, runs: int) -> dict[str, float]:
    """MB/s by what was done, in turns, so that drift of the machine hits all alike."""
    held = HeldOut(list(read_conversations(files.lines, SETTINGS, Counts()))[:50])
    work: dict[str, Callable[[], object]] = {
        "given answers, .jsonl": lambda: count(read_answered, files.lines),
        "prompts, .jsonl": lambda: count(read_conversations, files.lines),
        "prompts held against 50 others, .jsonl": lambda: [
            held.match(row) for row in read_conversations(files.lines, SETTINGS, Counts())
        ],
        "given answers, .json": lambda: count(read_answered, files.array),
        "given answers, .jsonl.gz": lambda: count(read_answered, files.packed),
        "json.loads alone, .jsonl": lambda: bare(files.lines),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(runs):
        for name, call in work.items():
            seconds[name].append(cpu_seconds(call))
    return {name: files.bytes / 1e6 / statistics.median(taken) for name, taken in seconds.items()}


def count(read: Callable[[Path, DataSettings, Counts], Iterable[object]], path: Path) -> None:
    counts = Counts()
    for _ in read(path, SETTINGS, counts):
        pass
    if not counts.kept:
        raise SystemExit(f"{path} has no row to measure:\n{counts.table(str(path))}")


def bare(path: Path) -> None:
    with open(path, encoding="utf-8", newline="\n") as file:
        for line in file:
            json.loads(line)


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main()
