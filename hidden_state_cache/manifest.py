"""What a store says about itself: identity, shards, totals, and how two identities are compared.

One JSON form serves the whole store (`manifest.json`) and each shard's sidecar, which is a manifest
of one shard: a folder therefore knows its identity from its first shard on, before it is complete.
What it says is believed only as far as it can be: fields of their kinds, names of shard files in this
folder, counts that their bytes can hold.
A mismatch is refused, field by field with both values, since features of another target, template
or tap train a head that fails only in serving. Given up: reading older layouts; another
`format_version` is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Literal

from hidden_state_cache.codec import RowDtype
from hidden_state_cache.decode import decode, shown

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SHARD_NAME = re.compile(r"shard-[0-9]{1,9}-[0-9]{1,9}\.safetensors")
MAX_BYTES = 1 << 62


class StoreError(ValueError):
    """A store that cannot be used as asked: one line, what is wrong, where, and what to do."""


@dataclass(frozen=True)
class TapSpec:
    """One tap: the output of 0-based decoder layer `layer`, or (None) at the final norm."""

    name: str  # "layer.12", "final", "final_prenorm"
    layer: int | None
    norm: Literal["pre", "post"]
    width: int


@dataclass(frozen=True)
class StoreIdentity:
    """Everything that must agree before features may be mixed, resumed or trained on."""

    target_id: str
    target_revision: str
    target_fingerprint: str
    tokenizer_hash: str
    template_hash: str
    thinking: str
    norm_kind: str
    norm_eps: float
    dataset_fingerprint: str
    taps: tuple[TapSpec, ...]  # in the order in which a feature row holds them
    mtptrain_version: str

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each tap; their sum is W, the width of a feature row."""
        return tuple(tap.width for tap in self.taps)

    def require(self, found: StoreIdentity, where: Path) -> None:
        """Raise StoreError naming each field in which `found`, the store at `where`, differs."""
        ours, theirs = _flat(self), _flat(found)
        faults = [
            f"{field} is {shown(theirs.get(field))} in the store but {shown(ours.get(field))} "
            "was expected"
            for field in ours | theirs
            if ours.get(field) != theirs.get(field)
        ]
        if faults:
            raise StoreError(f"{where}: {'; '.join(faults)}; capture again into another folder")


@dataclass(frozen=True)
class ShardInfo:
    """One shard file as it was written."""

    file: str
    samples: int
    tokens: int
    bytes: int
    checksum: str  # "sha256:<hex>" of the whole file


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json` (all shards, in reading order) or of a sidecar (one)."""

    format_version: int
    identity: StoreIdentity
    dtype: RowDtype
    shards: tuple[ShardInfo, ...]
    samples: int
    tokens: int
    bytes: int

    @classmethod
    def of(cls, identity: StoreIdentity, dtype: RowDtype, shards: Iterable[ShardInfo]) -> Manifest:
        """A manifest of `shards` with its totals."""
        kept = tuple(shards)
        samples, tokens = sum(s.samples for s in kept), sum(s.tokens for s in kept)
        size = sum(s.bytes for s in kept)
        return cls(FORMAT_VERSION, identity, dtype, kept, samples, tokens, size)

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: Path) -> Manifest:
        """Parse `text`, read from the file `where`.

        Raises StoreError where the format version is another, or a field is missing or unknown.
        """
        try:
            raw = json.loads(text)
            version = raw["format_version"]
            manifest = _parse(raw) if version == FORMAT_VERSION else None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            fault = f"damaged ({one_line(error)}); delete it and capture again"
            raise StoreError(f"{where}: {fault}") from error
        if manifest is None:
            fault = f"format_version is {shown(version)} in the store"
            fault = f"{fault} but {FORMAT_VERSION} was expected"
            raise StoreError(f"{where}: {fault}; delete this store, or capture into another folder")
        return manifest

    @classmethod
    def of_store(cls, folder: Path) -> Manifest:
        """The manifest of a complete store. Raises StoreError where there is none, or damaged."""
        if not (folder / MANIFEST).is_file():
            fault = "the store is incomplete, it has no manifest.json"
            raise StoreError(f"{folder}: {fault}; capture again into it, whole shards are kept")
        return cls.load(folder / MANIFEST)

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read a manifest or sidecar. Raises FileNotFoundError, or StoreError as `from_json`."""
        return cls.from_json(path.read_bytes().decode("utf-8", errors="replace"), path)


def size_fault(folder: Path, shard: ShardInfo) -> str | None:
    """What is wrong with the size of a shard's file, or None. Reads no content."""
    path = folder / shard.file
    found = path.stat().st_size if path.is_file() else None
    if found == shard.bytes:
        return None
    found_size = "missing" if found is None else f"{found} bytes"
    return f"{shard.file} is {found_size}, {shard.bytes} bytes were written"


def write_atomically(path: Path, data: bytes) -> None:
    """Write under a temporary name, fsync, rename, fsync the folder: `path` is whole or absent."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a full disk: its room is given back
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _flat(identity: StoreIdentity) -> dict[str, object]:
    """Field name → value, taps spelt out (`taps[0].norm`), so that a difference names its field."""
    fields = {field.name: getattr(identity, field.name) for field in dataclass_fields(identity)}
    del fields["taps"]
    for place, tap in enumerate(identity.taps):
        fields |= {f"taps[{place}].{name}": value for name, value in asdict(tap).items()}
    return fields


def one_line(error: BaseException) -> str:
    """An error's kind and message on one line, cut to what fits into a message."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _parse(raw: Any) -> Manifest:
    """Raises ValueError where a field is missing, unknown, of another kind, or cannot be true."""
    manifest = decode(Manifest, raw)
    if manifest != Manifest.of(manifest.identity, manifest.dtype, manifest.shards):
        raise ValueError("totals differ from the sum of the shards")
    if not manifest.shards:
        raise ValueError("it has no shards")
    if len({shard.file for shard in manifest.shards}) < len(manifest.shards):
        raise ValueError("it names a shard twice")
    widths = manifest.identity.widths
    if not widths or min(widths) < 1 or sum(widths) > MAX_BYTES:
        raise ValueError(f"no row has taps of widths {shown(widths)}")
    for shard in manifest.shards:
        _require_possible(shard, sum(widths))
    return manifest


def _require_possible(shard: ShardInfo, width: int) -> None:
    """A file in this folder, and counts that its bytes can hold: what is sized by them stays small."""
    if not SHARD_NAME.fullmatch(shard.file):
        raise ValueError(f"{shown(shard.file)} is no name of a shard")
    least = 8 * shard.samples + width * shard.tokens  # an offset a sample, a byte a value
    if shard.samples < 1 or shard.tokens < 0 or not least <= shard.bytes < MAX_BYTES:
        raise ValueError(
            f"{shard.file} cannot hold {shown(shard.samples)} samples of "
            f"{shown(shard.tokens)} tokens in {shown(shard.bytes)} bytes"
        )
