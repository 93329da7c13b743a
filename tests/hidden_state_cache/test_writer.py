"""A writer leaves whole shards or none, and resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hidden_state_cache import FeatureStore, FeatureWriter, StoredSample, StoreError, StoreIdentity

MakeSample = Callable[[int], StoredSample]


def test_resuming_skips_whole_shards(
    tmp_path: Path, identity: StoreIdentity, make_sample: MakeSample
) -> None:
    """A new writer knows the whole shards of its rank and of no other, and `finish` takes them."""
    FeatureWriter(tmp_path, identity, "bf16", rank=1).write_shard(7, [make_sample(0)])
    first = FeatureWriter(tmp_path, identity, "bf16")
    infos = [first.write_shard(index, [make_sample(index)]) for index in (0, 2)]
    resumed = FeatureWriter(tmp_path, identity, "bf16")
    assert resumed.completed() == {0, 2}
    infos.insert(1, resumed.write_shard(1, [make_sample(1)]))
    assert resumed.finish().shards[:3] == tuple(infos)


@pytest.mark.parametrize("cut", ["shard", "sidecar", "all"])
def test_a_shard_cut_short_is_not_whole(
    tmp_path: Path, identity: StoreIdentity, make_sample: MakeSample, cut: str
) -> None:
    """A shard that is too short, absent, or without its sidecar is written again, not gathered."""
    writer = FeatureWriter(tmp_path, identity, "bf16")
    for index in range(2):
        writer.write_shard(index, [make_sample(index)])
    shard = tmp_path / "shard-0-1.safetensors"
    if cut == "shard":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif cut == "sidecar":
        shard.with_suffix(".json").unlink()
    else:
        shard.unlink()
    assert writer.completed() == {0}
    with pytest.raises(StoreError, match="shard-0-1.safetensors .*capture again"):
        writer.finish()
    assert not (tmp_path / "manifest.json").exists()
    writer.write_shard(1, [make_sample(1)])
    assert writer.finish().samples == 2


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_another_identity_is_refused(
    tmp_path: Path, identity: StoreIdentity, make_sample: MakeSample, finished: bool
) -> None:
    """A writer refuses a folder of another identity, naming the field and both values."""
    writer = FeatureWriter(tmp_path, identity, "bf16")
    writer.write_shard(0, [make_sample(0)])
    if finished:
        writer.finish()
        (tmp_path / "shard-0-0.json").unlink()
    other = replace(identity, template_hash="c1")
    with pytest.raises(StoreError, match="template_hash is 'c0' in the store but 'c1'"):
        FeatureWriter(tmp_path, other, "bf16", rank=1)


def test_a_folder_of_another_dtype_is_refused(
    tmp_path: Path, identity: StoreIdentity, make_sample: MakeSample
) -> None:
    """Shards of two dtypes never meet in one store."""
    FeatureWriter(tmp_path, identity, "bf16").write_shard(0, [make_sample(0)])
    with pytest.raises(StoreError, match="dtype is 'bf16' in the store but 'int8'"):
        FeatureWriter(tmp_path, identity, "int8")


def test_ranks_are_gathered_in_order(
    tmp_path: Path, identity: StoreIdentity, make_sample: MakeSample
) -> None:
    """`finish` orders shards by rank and index as numbers, however they were written."""
    for rank, index in [(10, 0), (2, 11), (2, 3), (0, 0)]:
        FeatureWriter(tmp_path, identity, "bf16", rank).write_shard(index, [make_sample(rank)])
    files = [shard.file for shard in FeatureWriter(tmp_path, identity, "bf16").finish().shards]
    order = ["0-0", "2-3", "2-11", "10-0"]
    assert files == [f"shard-{place}.safetensors" for place in order]
    assert [sample.id for sample in FeatureStore.open(tmp_path)] == [
        make_sample(rank).id for rank in (0, 2, 2, 10)
    ]


def test_writing_on_makes_the_store_incomplete(
    tmp_path: Path, identity: StoreIdentity, make_sample: MakeSample
) -> None:
    """A shard written into a finished store takes the manifest away until the next `finish`."""
    writer = FeatureWriter(tmp_path, identity, "bf16")
    writer.write_shard(0, [make_sample(0)])
    writer.finish()
    writer.write_shard(1, [make_sample(1)])
    with pytest.raises(StoreError, match="incomplete"):
        FeatureStore.open(tmp_path)
    assert writer.finish().samples == 2


def test_writing_twice_gives_the_same_bytes(
    tmp_path: Path, identity: StoreIdentity, make_sample: MakeSample
) -> None:
    """A shard's checksum depends on its samples alone."""
    writer = FeatureWriter(tmp_path, identity, "int8")
    samples = [make_sample(number) for number in range(4)]
    assert len({writer.write_shard(0, samples).checksum for _ in range(8)}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "shard-0-0.json",
        "shard-0-0.safetensors",
    ]


def test_samples_that_do_not_fit_are_refused(
    tmp_path: Path, identity: StoreIdentity, make_sample: MakeSample
) -> None:
    """No sample, a row too few, or another width raises StoreError and writes nothing."""
    writer = FeatureWriter(tmp_path, identity, "bf16")
    sample = make_sample(2)
    wrong = [
        [],
        [replace(sample, features=sample.features[1:])],
        [replace(sample, features=sample.features[:, 1:])],
        [replace(sample, loss_mask=sample.loss_mask[1:])],
    ]
    for samples in wrong:
        with pytest.raises(StoreError):
            writer.write_shard(0, samples)
    with pytest.raises(StoreError, match="no shards"):
        writer.finish()
    assert not list(tmp_path.iterdir())


def test_a_row_that_overflows_is_refused(
    tmp_path: Path, identity: StoreIdentity, make_sample: MakeSample
) -> None:
    """A row that is finite in float32 but not in fp16 is refused, naming sample and row."""
    sample = make_sample(2)
    features = sample.features.clone()
    features[1, 0] = 1e5
    writer = FeatureWriter(tmp_path, identity, "fp16")
    with pytest.raises(StoreError, match="'größe-2-数': row 1 is not finite as fp16"):
        writer.write_shard(0, [replace(sample, features=features)])
    assert torch.isfinite(features).all()


def test_an_unknown_dtype_is_refused(tmp_path: Path, identity: StoreIdentity) -> None:
    """A dtype that the store has not raises StoreError listing those it has."""
    with pytest.raises(StoreError, match="'int4' is unknown; use one of .*'bf16'"):
        FeatureWriter(tmp_path, identity, "int4")  # pyright: ignore[reportArgumentType]
