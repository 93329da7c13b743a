"""Files changed behind a finished run's back, and whether the next run mends them or says what to do.

One damage is one line below. It gives up damage that a restored backup would be: a whole older folder.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import drill
from drill import Field, Tried, a_place


@dataclass(frozen=True)
class Damage:
    """Done to a finished run; `gone` are taken away before, so that the next run reads what was damaged."""

    fault: str
    file: str
    hurt: Callable[[Path], None]
    gone: tuple[str, ...] = ("run",)
    verb: str = "train"


def damages(field: Field, draw: random.Random) -> Iterator[Tried]:
    """Files changed behind the run's back: it mends them, or says which and then does once they are deleted."""
    shard, flip = "cache/stores/*/features/shard-0-1.safetensors", partial(_flip, draw)
    manifest = "cache/stores/*/features/manifest.json"
    answers, checkpoint = "cache/answers/*/answers-00001.jsonl", "run/train/checkpoints/last.ckpt"
    unfinished = ("run/draft", "run/train/stage.json")
    for damage in (
        Damage("flipped bit", shard, flip),
        Damage("cut short", shard, _cut),
        Damage("missing", shard, Path.unlink),
        Damage("of another version", manifest, _another_version),
        Damage("cut short", manifest, _cut),
        Damage("flipped bit", answers, flip, ("run", "cache/stores")),
        Damage("missing", answers, Path.unlink, ("run", "cache/stores")),
        Damage("flipped bit", checkpoint, flip, unfinished),
        Damage("cut short", checkpoint, _cut, unfinished),
        Damage("flipped bit", "run/draft/model.safetensors", flip, (), "validate"),
        Damage("cut short", "cache/answers/*/stage.json", _cut, ("run", "cache/stores")),
        Damage("cut short", "run/train/started.json", _cut, unfinished),
    ):
        yield _damaged(field, damage)


def _damaged(field: Field, damage: Damage) -> Tried:
    with a_place(field) as place:
        shutil.copytree(field.whole.place, place, dirs_exist_ok=True)
        file = next(iter(place.glob(damage.file)))
        for name in damage.gone:
            gone = place / name
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        damage.hurt(file)
        ended = drill.run(field.subject, place, verb=damage.verb)
        if ended.code == 2 and str(place) in ended.line:
            remark, mended = ended.line.replace(str(place), ""), True
            for asked in _deleted(damage, file):
                shutil.rmtree(asked) if asked.is_dir() else asked.unlink()
        else:
            remark, mended = "mended without a word", ended.code == 0
        same, why = field.ends_alike(place)
    return Tried(
        damage.fault, damage.file.rpartition("/")[2], mended and same, remark if same else why
    )


def _deleted(damage: Damage, file: Path) -> list[Path]:
    """What the message asks to delete: the file, or the folder that it makes useless."""
    whole_folder = damage.verb == "validate" or file.name == "started.json"
    return [file.parent if whole_folder else file]


def _flip(draw: random.Random, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data) // 4, len(data) * 3 // 4)] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _another_version(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 99}))
