"""What a store says about itself: identity, shards, totals, and how two identities are compared.

One JSON form serves the whole store (`manifest.json`) and each shard's sidecar, which is a manifest
of one shard: a folder therefore knows its identity from its first shard on, before it is complete.
A mismatch is refused, field by field with both values, since features of another target, template
or tap train a head that fails only in serving. Given up: reading older layouts; another
`format_version` is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Literal

from hidden_state_cache.codec import ROW_DTYPES, RowDtype

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


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
            f"{field} is {theirs.get(field)!r} in the store but {ours.get(field)!r} was expected"
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
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fault = f"damaged ({error!r}); delete it and capture again"
            raise StoreError(f"{where}: {fault}") from error
        if manifest is None:
            fault = f"format_version is {version!r} in the store but {FORMAT_VERSION} was expected"
            raise StoreError(f"{where}: {fault}; capture again into another folder")
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
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
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


def _parse(raw: dict[str, Any]) -> Manifest:
    taps = tuple(TapSpec(**tap) for tap in raw["identity"]["taps"])
    named: dict[str, Any] = {**raw["identity"], "taps": taps}
    identity = StoreIdentity(**named)
    shards = tuple(ShardInfo(**shard) for shard in raw["shards"])
    whole: dict[str, Any] = {**raw, "identity": identity, "shards": shards}
    manifest = Manifest(**whole)
    if manifest.dtype not in ROW_DTYPES:
        raise ValueError(f"dtype {manifest.dtype!r}")
    if manifest != Manifest.of(identity, manifest.dtype, shards):
        raise ValueError("totals differ from the sum of the shards")
    return manifest
