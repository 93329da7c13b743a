"""verify finds what reading would not."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hidden_state_cache import FeatureStore, Manifest, RowDtype, StoredSample, StoreError, verify
from hidden_state_cache.codec import TORCH_DTYPES
from hidden_state_cache.shard import open_shard, value_places

WriteStore = Callable[..., list[StoredSample]]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "int8", "fp8"])
def test_a_sound_store_has_no_faults(
    tmp_path: Path, write_store: WriteStore, dtype: RowDtype
) -> None:
    """A store as written verifies, and the result counts all of it."""
    write_store(dtype, ranks=2)
    result = verify(tmp_path)
    manifest = FeatureStore.open(tmp_path).manifest
    assert result.ok and result.faults == ()
    assert (result.shards, result.tokens) == (4, manifest.tokens)
    assert result.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("place", [0, 20, -1, -200])
def test_a_flipped_bit_is_found(tmp_path: Path, write_store: WriteStore, place: int) -> None:
    """One flipped bit, in the header or in the rows, is a fault of that shard and of no other."""
    write_store()
    flip(tmp_path / "shard-0-1.safetensors", place)
    result = verify(tmp_path)
    assert not result.ok and len(result.faults) == 1
    assert result.faults[0].startswith("shard-0-1.safetensors has checksum sha256:")


def test_every_faulty_shard_is_named(tmp_path: Path, write_store: WriteStore) -> None:
    """A shard cut short, a missing one and a flipped one are all reported, in order."""
    write_store(shards=4)
    shards = [tmp_path / f"shard-0-{index}.safetensors" for index in range(4)]
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    shards[1].unlink()
    flip(shards[3], -1)
    faults = verify(tmp_path).faults
    named = [fault.split(" ", 1)[0] for fault in faults]
    assert named == [shards[0].name, shards[1].name, shards[3].name]


@pytest.mark.parametrize("piece", [64, 1 << 18])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp8", "int8"])
def test_a_value_that_is_not_finite_is_found_wherever_it_lies(
    tmp_path: Path,
    write_store: WriteStore,
    monkeypatch: pytest.MonkeyPatch,
    dtype: RowDtype,
    piece: int,
) -> None:
    """The last value of a tensor of floats, and its first, are checked, also where pieces are cut between them."""
    monkeypatch.setattr(importlib.import_module("hidden_state_cache.verify"), "_PIECE", piece)
    write_store(dtype)
    assert verify(tmp_path).ok
    manifest = Manifest.of_store(tmp_path)
    path = tmp_path / manifest.shards[0].file
    sound = path.read_bytes()
    scaled = dtype == "int8"
    size = 4 if scaled else TORCH_DTYPES[dtype].itemsize
    at = value_places(path)["scales" if scaled else "features"]
    for first in (at.start, at.stop - size):
        data = sound[:first] + b"\xff" * (size - 1) + b"\x7f" + sound[first + size :]
        path.write_bytes(data)
        checksum = f"sha256:{hashlib.sha256(data).hexdigest()}"
        shards = (replace(manifest.shards[0], checksum=checksum), *manifest.shards[1:])
        (tmp_path / "manifest.json").write_text(replace(manifest, shards=shards).to_json())
        (fault,) = verify(tmp_path).faults
        row = 0 if first == at.start else manifest.shards[0].tokens - 1
        assert fault.startswith(f"{path.name}: row {row} ") and fault.endswith("is not finite")


def test_a_row_that_is_not_finite_is_found(tmp_path: Path, write_store: WriteStore) -> None:
    """A NaN under a right checksum is a fault that names the row and its sample."""
    samples = write_store("fp32")
    manifest = Manifest.of_store(tmp_path)
    path = tmp_path / manifest.shards[0].file
    row = open_shard(tmp_path, manifest.shards[0], manifest).features[1].numpy().tobytes()
    data = path.read_bytes().replace(row, torch.full((13,), torch.nan).numpy().tobytes())
    path.write_bytes(data)
    checksum = f"sha256:{hashlib.sha256(data).hexdigest()}"
    shards = (replace(manifest.shards[0], checksum=checksum), *manifest.shards[1:])
    (tmp_path / "manifest.json").write_text(replace(manifest, shards=shards).to_json())
    assert verify(tmp_path).faults == (
        f"{path.name}: row 1 (sample {samples[1].id!r}) is not finite",
    )


def test_an_incomplete_store_cannot_be_verified(tmp_path: Path) -> None:
    """Without a manifest there is nothing to verify against: StoreError."""
    with pytest.raises(StoreError, match="incomplete"):
        verify(tmp_path)
