"""Write a store, shard by shard, from several ranks, and resume where a run was cut short.

Each rank owns the files `shard-<rank>-<index>`. A shard is whole once its sidecar, a manifest of
that one shard, stands beside it: the sidecar is written after the shard, both atomically, so a
crash at any point leaves a shard that is either whole or written again. `finish` gathers the
sidecars into `manifest.json`. Given up: locks between ranks. The caller lets one rank call `finish`
after all of them have written.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from hidden_state_cache.codec import ROW_DTYPES, RowDtype
from hidden_state_cache.manifest import (
    MANIFEST,
    Manifest,
    ShardInfo,
    StoreError,
    StoreIdentity,
    size_fault,
    write_atomically,
)
from hidden_state_cache.shard import StoredSample, pack

_PLACE = re.compile(r"shard-([0-9]{1,9})-([0-9]{1,9})\.(?:json|safetensors)")


class FeatureWriter:
    """One rank's writer. Makes the folder.

    Raises StoreError where the folder holds shards of another identity or dtype, with both values.
    """

    def __init__(
        self, folder: Path, identity: StoreIdentity, dtype: RowDtype, rank: int = 0
    ) -> None:
        if dtype not in ROW_DTYPES:
            raise StoreError(f"{folder}: dtype {dtype!r} is unknown; use one of {ROW_DTYPES}")
        self._folder = folder
        self._identity = identity
        self._dtype: RowDtype = dtype
        self._rank = rank
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            self._load(folder / MANIFEST)
        self._sidecars()

    def completed(self) -> frozenset[int]:
        """Indexes of this rank's whole shards: sidecar present, file of the size it says."""
        return frozenset(
            index
            for (rank, index), info in self._sidecars().items()
            if rank == self._rank and size_fault(self._folder, info) is None
        )

    def write_shard(self, index: int, samples: Sequence[StoredSample]) -> ShardInfo:
        """Write shard `index` of this rank, replacing what was there.

        Raises StoreError where there are no samples, a shape does not fit, or a row is not finite.
        """
        path = self._folder / f"shard-{self._rank}-{index}.safetensors"
        if not samples:
            raise StoreError(f"{path}: a shard needs at least one sample; leave this index out")
        data = pack(samples, self._dtype, self._identity.widths)
        tokens = sum(sample.input_ids.shape[0] for sample in samples)
        checksum = f"sha256:{hashlib.sha256(data).hexdigest()}"
        info = ShardInfo(path.name, len(samples), tokens, len(data), checksum)
        # From here until both are written anew, neither the shard nor the store may look complete.
        (self._folder / MANIFEST).unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
        write_atomically(path, data)
        self._write_json(path.with_suffix(".json"), [info])
        return info

    def finish(self) -> Manifest:
        """Gather every rank's shards, ordered by rank and index, and write `manifest.json`.

        Raises StoreError where there is no shard, or one of any rank is not whole.
        """
        shards = self._sidecars()
        faults = [size_fault(self._folder, info) for info in shards.values()]
        faults += [
            f"{path.name} has no sidecar"
            for path in sorted(self._folder.glob("shard-*.safetensors"))
            if _place(path) not in {*shards, None}
        ]
        if not shards:
            faults.append("it has no shards")
        if fault := next((fault for fault in faults if fault), None):
            raise StoreError(f"{self._folder}: {fault}; capture again, whole shards are kept")
        return self._write_json(self._folder / MANIFEST, list(shards.values()))

    def _write_json(self, path: Path, shards: Sequence[ShardInfo]) -> Manifest:
        manifest = Manifest.of(self._identity, self._dtype, shards)
        write_atomically(path, manifest.to_json().encode())
        return manifest

    def _sidecars(self) -> dict[tuple[int, int], ShardInfo]:
        """Every rank's sidecars by (rank, index), in that order."""
        found = [(_place(path), path) for path in self._folder.glob("shard-*.json")]
        named = sorted((place, path) for place, path in found if place is not None)
        return {place: self._sidecar(path) for place, path in named}

    def _sidecar(self, path: Path) -> ShardInfo:
        shards = self._load(path).shards
        if [shard.file for shard in shards] != [path.with_suffix(".safetensors").name]:
            raise StoreError(f"{path}: it describes another shard; delete it and capture again")
        return shards[0]

    def _load(self, path: Path) -> Manifest:
        found = Manifest.load(path)
        self._identity.require(found.identity, path)
        if found.dtype != self._dtype:
            fault = f"dtype is {found.dtype!r} in the store but {self._dtype!r} was expected"
            raise StoreError(f"{path}: {fault}; capture again into another folder")
        return found


def _place(path: Path) -> tuple[int, int] | None:
    """(rank, index) of a file named `shard-<rank>-<index>.*`; None of a file that is none of ours."""
    named = _PLACE.fullmatch(path.name)
    return (int(named[1]), int(named[2])) if named else None
