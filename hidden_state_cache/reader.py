"""Read a store: a sequence of samples, memory-mapped, in any order.

Opening reads `manifest.json` and the sizes of the shard files; a shard is mapped when first touched
(header and offsets are read, no row), and a sample costs one pass from the mapped pages into
float32, without a copy in between. Threads may share a store: two that open one shard at once both
get a valid mapping. Worker processes map the files anew. Given up: checksums on reading, which
would read everything; that is `verify`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

from torch import Tensor

from hidden_state_cache.manifest import Manifest, StoreError, StoreIdentity, TapSpec, size_fault
from hidden_state_cache.shard import Shard, StoredSample, open_shard


class FeatureStore:
    """A complete store; `FeatureStore.open` makes one."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._starts = [0, *accumulate(shard.samples for shard in manifest.shards)]
        self._widths = manifest.identity.widths
        self._opened: dict[int, Shard] = {}

    @classmethod
    def open(cls, folder: Path, expect: StoreIdentity | None = None) -> FeatureStore:
        """Open the store in `folder`, reading no tensor.

        Raises StoreError where it is incomplete, a shard is missing or cut short, or its identity
        is not `expect`, naming each field with both values.
        """
        manifest = Manifest.of_store(folder)
        if expect is not None:
            expect.require(manifest.identity, folder)
        for shard in manifest.shards:
            if fault := size_fault(folder, shard):
                raise StoreError(f"{folder}: {fault}; capture again into it, whole shards are kept")
        return cls(folder, manifest)

    @property
    def identity(self) -> StoreIdentity:
        return self.manifest.identity

    @property
    def taps(self) -> tuple[TapSpec, ...]:
        """The taps, in the order in which a feature row holds them."""
        return self.manifest.identity.taps

    @property
    def num_tokens(self) -> int:
        return self.manifest.tokens

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sample. The first use opens every shard."""
        shards = map(self._shard, range(len(self.manifest.shards)))
        return [stop - start for shard in shards for start, stop in pairwise(shard.offsets)]

    def __len__(self) -> int:
        return self.manifest.samples

    def __getitem__(self, index: int) -> StoredSample:
        """Sample `index` with features dequantised to float32 [T, W]; its tensors are copies.

        Raises IndexError out of range, StoreError where the shard's header is damaged.
        """
        shard, place = self._find(index)
        return shard.sample(place, self._widths)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """`input_ids` and `loss_mask` [T] of sample `index` alone: no feature is read.

        Raises as indexing does.
        """
        shard, place = self._find(index)
        return shard.tokens(place)

    def __iter__(self) -> Iterator[StoredSample]:
        return map(self.__getitem__, range(len(self)))

    def __reduce__(self) -> tuple[type[FeatureStore], tuple[Path, Manifest]]:
        # What a worker process is sent: never the mapped tensors, which would be copied whole.
        return FeatureStore, (self.folder, self.manifest)

    def _find(self, index: int) -> tuple[Shard, int]:
        """The sample's shard, and its place in it."""
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"sample {index} of a store of {len(self)}")
        number = bisect_right(self._starts, place) - 1
        return self._shard(number), place - self._starts[number]

    def _shard(self, number: int) -> Shard:
        if number not in self._opened:
            self._opened[number] = open_shard(
                self.folder, self.manifest.shards[number], self.manifest
            )
        return self._opened[number]
