"""Does a run survive what happens to runs? Kills, full and read-only disks, damage, a second run beside it.

Every drill is a real `mtptrain train` (prepare, capture, train) in a folder of its own. It is survived if the
run, after it was told to go on (and after what its one line asked for, where it refused), leaves bit for bit
what an uninterrupted run leaves; a fault that changes the result without a word, or a traceback, is a loss.
Every other kill captures features while answering, the rest in a pass of its own. It gives up power cuts:
what the kernel holds is written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import drill
from drill import STAGES, Ended, Field, Subject, Tried, a_place
from drill_damage import damages
from drill_target import make_target

DISK_BYTES = 1 << 30  # of the small file system


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="fault-drill-", dir=args.work) as name:
        folder = Path(name)
        subject = make_target(args.target, folder / "target")
        fields = [_field(subject, folder, way) for way in ("false", "true")]
        drills: dict[str, Callable[[], Iterator[Tried]]] = {
            "kill": partial(kills, fields, args.kills, random.Random(args.seed)),
            "disk": partial(full_disks, fields[0]),
            "damage": partial(damages, fields[0], random.Random(args.seed)),
            "read-only": partial(read_only, fields[0]),
            "two": partial(two_at_once, fields[0]),
        }
        tried = [shown(t) for name in args.only or drills for t in drills[name]()]
    survived = sum(t.survived for t in tried)
    lost = len(tried) - survived
    print(json.dumps({"tried": len(tried), "survived": survived, "lost": lost}), flush=True)
    raise SystemExit(1 if lost else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--target", default="tiny", help="tiny, smollm2, or a transformers folder")
    parser.add_argument("--kills", type=int, default=50, help="random moments")
    parser.add_argument("--quick", action="store_true", help="six kills")
    parser.add_argument("--only", nargs="*", choices=("kill", "disk", "damage", "read-only", "two"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, help="where the runs' folders are made; default: temporary"
    )
    args = parser.parse_args()
    args.kills = 6 if args.quick else args.kills
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return args


def _field(subject: Subject, folder: Path, during_prepare: str) -> Field:
    way = (*subject.settings, f"capture.during_prepare={during_prepare}")
    mine = replace(subject, settings=way)
    whole = drill.uninterrupted(mine, folder / f"whole-{during_prepare}")
    seconds = ", ".join(f"{stage} {s:.2f} s" for stage, s in whole.seconds.items())
    print(f"uninterrupted, capture.during_prepare={during_prepare}: {seconds}", flush=True)
    return Field(mine, whole, folder)


def shown(tried: Tried) -> Tried:
    word = "survived" if tried.survived else "LOST"
    print(f"{tried.fault:<22} {tried.where:<34} {word:<9} {tried.remark[:150]}", flush=True)
    return tried


# ---- kills -----------------------------------------------------------------------------------------------


def kills(fields: list[Field], count: int, draw: random.Random) -> Iterator[Tried]:
    """SIGKILL at `count` moments, spread over the stages, drawn evenly from each stage's time."""
    for number in range(count):
        field = fields[number // len(STAGES) % len(fields)]
        stage = list(STAGES)[number % len(STAGES)]
        after = draw.random() * field.whole.seconds[stage]
        with a_place(field) as place:
            process = drill.start(field.subject, place)
            drill.until_begun(stage, place, process)
            time.sleep(after)
            drill.kill(process)
            killed = drill.wait(process, place).code == -signal.SIGKILL
            same, remark = field.ends_alike(place)
        remark = remark if killed else f"{remark}; it had ended before the kill"
        yield Tried("SIGKILL", f"{stage}, after {after:.3f} s", same, remark)


# ---- disks -----------------------------------------------------------------------------------------------


def full_disks(field: Field) -> Iterator[Tried]:
    """The disk fills while each stage writes: a small tmpfs, or where none can be mounted a limit on file size."""
    for stage in STAGES:
        with a_place(field) as place:
            if _mount(place):
                fault, ended = "disk full (tmpfs)", _fill_during(field, stage, place)
            else:
                fault, ended = "disk full (file size)", _limited(field, stage, place)
            left = [str(path) for path in place.rglob("*.tmp")]
            same, remark = field.ends_alike(place)
            subprocess.run(["umount", place], capture_output=True)
        said = ended.code == 2 and "no disk space left" in ended.line and not left
        yield Tried(
            fault,
            stage,
            said and same,
            remark if said else f"exit {ended.code}: {ended.line} {left}",
        )


def _mount(place: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", place]
    return subprocess.run(command, capture_output=True).returncode == 0


def _fill_during(field: Field, stage: str, place: Path) -> Ended:
    """The run is held still while its disk is filled to the last byte, and then goes on."""
    process = drill.start(field.subject, place)
    drill.until_begun(stage, place, process)
    os.kill(process, signal.SIGSTOP)
    ballast = place / "ballast"
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(place).free)
    os.kill(process, signal.SIGCONT)
    ended = drill.wait(process, place)
    ballast.unlink()
    return ended


def _limited(field: Field, stage: str, place: Path) -> Ended:
    """No file may be as large as the largest of the stage."""
    root = next(iter(field.whole.place.glob(STAGES[stage]))).parent
    largest = max(path.stat().st_size for path in root.rglob("*") if path.is_file())
    return drill.wait(drill.start(field.subject, place, limit=largest - 1), place)


def read_only(field: Field) -> Iterator[Tried]:
    """The run folder, or the cache, can be read and not written: one line, and nothing is lost."""
    for name in ("run", "cache"):
        with a_place(field) as place, _frozen(place / name) as frozen:
            ended = drill.run(field.subject, place) if frozen else Ended(2, "not tried: no mount")
            _thaw(place / name)
            same, remark = field.ends_alike(place)
            said = ended.code == 2
        yield Tried("read-only", name, said and same, f"{remark}; {ended.line}")


@contextmanager
def _frozen(folder: Path) -> Iterator[bool]:
    """Mounts the folder over itself, for reading only: even root cannot write there."""
    folder.mkdir(parents=True)
    bound = subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode == 0
    remount = ["mount", "-o", "remount,ro,bind", folder]
    try:
        yield bound and subprocess.run(remount, capture_output=True).returncode == 0
    finally:
        _thaw(folder)


def _thaw(folder: Path) -> None:
    subprocess.run(["umount", folder], capture_output=True)


# ---- two runs --------------------------------------------------------------------------------------------


def two_at_once(field: Field) -> Iterator[Tried]:
    """A second run in the same run folder, or on the same cached stage, leaves with the first one's process id."""
    for what, stage, more in (
        ("the same run folder", "train", ()),
        ("the same answers", "prepare", ("run_dir={}/other",)),
        ("the same store", "capture", ("run_dir={}/other",)),
    ):
        with a_place(field) as place:
            first = drill.start(field.subject, place)
            drill.until_begun(stage, place, first)
            os.kill(first, signal.SIGSTOP)  # so that the second meets it there
            second = drill.run(field.subject, place, *(word.format(place) for word in more))
            os.kill(first, signal.SIGCONT)
            ended = drill.wait(first, place)
            found = drill.result_of(place)
        left = second.code == 2 and f"(process {first})" in second.line
        same = ended.code == 0 and found == field.whole.result
        remark = second.line.replace(str(place), "") if left and same else f"{second}; {ended}"
        yield Tried("two runs", what, left and same, remark)


if __name__ == "__main__":
    main()
