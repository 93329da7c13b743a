"""A store gives back what was written, opens without reading rows, and refuses what it is not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hidden_state_cache import (
    FeatureStore,
    Manifest,
    RowDtype,
    StoredSample,
    StoreError,
    StoreIdentity,
)
from hidden_state_cache import reader as reader_module
from hidden_state_cache import shard as shard_module

WriteStore = Callable[..., list[StoredSample]]


def same(one: StoredSample, other: StoredSample) -> bool:
    tensors = ("input_ids", "loss_mask", "features")
    names = (one.id, one.category) == (other.id, other.category)
    return names and all(torch.equal(getattr(one, t), getattr(other, t)) for t in tensors)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_round_trip_is_bit_exact(tmp_path: Path, write_store: WriteStore, dtype: RowDtype) -> None:
    """bf16-representable features, ids, masks and unicode names come back bit for bit, by index."""
    samples = write_store(dtype, ranks=2)
    store = FeatureStore.open(tmp_path)
    assert len(store) == len(samples) == 8
    assert store.num_tokens == sum(store.lengths)
    assert store.lengths == [sample.input_ids.shape[0] for sample in samples]
    for index in (5, 0, 7, 3, 1, 2, 6, 4, -1):
        assert same(store[index], samples[index])


@pytest.mark.parametrize("dtype", ["fp16", "int8", "fp8"])
def test_rounded_rows_come_back_as_float32(
    tmp_path: Path, write_store: WriteStore, dtype: RowDtype
) -> None:
    """Rows that were rounded come back as float32, each tap within 7 % of its largest value."""
    samples = write_store(dtype)
    for found, wanted in zip(FeatureStore.open(tmp_path), samples, strict=True):
        assert found.features.dtype == torch.float32
        pairs = zip(found.features.split((8, 5), 1), wanted.features.split((8, 5), 1), strict=True)
        for part, exact in pairs:
            assert (part - exact).abs().max() <= 0.07 * exact.abs().max()


def test_opening_reads_headers_only(
    tmp_path: Path, write_store: WriteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening, counting and describing a store opens no shard; one sample opens one."""
    write_store(shards=5)
    opened: list[str] = []

    def watch(folder: Path, info: object, manifest: object) -> object:
        opened.append(info.file)  # pyright: ignore[reportAttributeAccessIssue]
        return real(folder, info, manifest)  # pyright: ignore[reportArgumentType]

    real = reader_module.open_shard
    monkeypatch.setattr(reader_module, "open_shard", watch)
    store = FeatureStore.open(tmp_path)
    assert (len(store), len(store.taps), store.num_tokens > 0, opened) == (10, 2, True, [])
    assert store[7].id == store[6].id.replace("6", "7")
    assert opened == ["shard-0-3.safetensors"]


def test_ten_thousand_shards_open_from_the_manifest_alone(
    tmp_path: Path, write_store: WriteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of 10,000 shards opens without opening one of them; a sample opens its own shard and no other."""
    write_store(shards=1)
    manifest = FeatureStore.open(tmp_path).manifest
    first = manifest.shards[0]
    infos = [replace(first, file=f"shard-0-{n}.safetensors") for n in range(10_000)]
    for info in infos[1:]:
        (tmp_path / info.file).hardlink_to(tmp_path / first.file)
    many = Manifest.of(manifest.identity, manifest.dtype, infos)
    (tmp_path / "manifest.json").write_text(many.to_json())
    opened: list[Path] = []
    real = shard_module.safe_open

    def watch(path: Path, framework: str) -> object:
        opened.append(path)
        return real(path, framework=framework)

    monkeypatch.setattr(shard_module, "safe_open", watch)
    store = FeatureStore.open(tmp_path)
    assert (len(store), store.num_tokens, opened) == (20_000, many.tokens, [])
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert store[12_345].id == store[1].id
    assert [path.name for path in opened] == ["shard-0-6172.safetensors", "shard-0-0.safetensors"]


def test_samples_are_copies(tmp_path: Path, write_store: WriteStore) -> None:
    """Writing into a sample changes neither the next reading of it nor the file."""
    write_store("fp32")
    before = (tmp_path / "shard-0-0.safetensors").read_bytes()
    store = FeatureStore.open(tmp_path)
    kept = store[0].features.clone()
    store[0].features.zero_()
    assert torch.equal(store[0].features, kept)
    assert (tmp_path / "shard-0-0.safetensors").read_bytes() == before


def test_tokens_alone_are_those_of_the_sample(tmp_path: Path, write_store: WriteStore) -> None:
    """Ids and mask of every sample, also counted from the end, without its features."""
    write_store()
    store = FeatureStore.open(tmp_path)
    for index in range(-len(store), len(store)):
        ids, mask = store.tokens(index)
        assert torch.equal(ids, store[index].input_ids) and ids.dtype == torch.int64
        assert torch.equal(mask, store[index].loss_mask) and mask.dtype == torch.bool


def test_out_of_range(tmp_path: Path, write_store: WriteStore) -> None:
    """An index beyond either end raises IndexError, and iteration ends at the last."""
    write_store()
    store = FeatureStore.open(tmp_path)
    for index in (4, -5):
        with pytest.raises(IndexError):
            store[index]
        with pytest.raises(IndexError):
            store.tokens(index)
    assert [sample.id for sample in store] == [store[index].id for index in range(4)]


def test_a_missing_manifest_says_what_to_do(tmp_path: Path, write_store: WriteStore) -> None:
    """A folder without manifest is incomplete, and the error says to capture again."""
    write_store()
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(StoreError, match="incomplete, it has no manifest.json; capture again"):
        FeatureStore.open(tmp_path)


@pytest.mark.parametrize("cut", [True, False])
def test_a_shard_cut_short_is_refused(tmp_path: Path, write_store: WriteStore, cut: bool) -> None:
    """A store with a shard missing or shorter than written does not open, and names the shard."""
    write_store()
    shard = tmp_path / "shard-0-1.safetensors"
    data = shard.read_bytes()
    shard.unlink()
    if cut:
        shard.write_bytes(data[:-1])
    found = f"{len(data) - 1} bytes" if cut else "missing"
    with pytest.raises(StoreError, match=f"{shard.name} is {found}, {len(data)} bytes were"):
        FeatureStore.open(tmp_path)


def test_a_damaged_header_is_refused(tmp_path: Path, write_store: WriteStore) -> None:
    """A shard whose header is damaged raises StoreError at its first sample, others still read."""
    write_store()
    shard = tmp_path / "shard-0-1.safetensors"
    data = bytearray(shard.read_bytes())
    data[8] ^= 0xFF  # the header's opening brace
    shard.write_bytes(data)
    store = FeatureStore.open(tmp_path)
    assert store[1].id
    with pytest.raises(StoreError, match=r"shard-0-1.safetensors: damaged"):
        store[2]


def test_a_swapped_shard_is_refused(tmp_path: Path, write_store: WriteStore) -> None:
    """A shard of the right size but other contents' counts than the manifest's is refused."""
    write_store()
    manifest = FeatureStore.open(tmp_path).manifest
    info = manifest.shards[0]
    wrong = replace(manifest, shards=(replace(info, tokens=info.tokens + 1), *manifest.shards[1:]))
    with pytest.raises(StoreError, match="in it but"):
        FeatureStore(tmp_path, wrong)[0]


def test_another_identity_is_refused_with_both_values(
    tmp_path: Path, write_store: WriteStore, identity: StoreIdentity
) -> None:
    """A store of another target revision than expected is refused, naming field and both values."""
    write_store()
    assert FeatureStore.open(tmp_path, identity).identity == identity
    expected = replace(identity, target_revision="v2")
    with pytest.raises(StoreError, match="target_revision is 'main' in the store but 'v2'"):
        FeatureStore.open(tmp_path, expected)


def test_threads_and_processes_share_a_store(tmp_path: Path, write_store: WriteStore) -> None:
    """Threads read one store at once, and a pickled store (a worker's) carries no rows."""
    samples = write_store(shards=8)
    store = FeatureStore.open(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(store.__getitem__, list(range(16)) * 4))
    assert all(same(found, wanted) for found, wanted in zip(read, samples * 4, strict=True))
    sent = pickle.loads(pickle.dumps(store))
    assert not sent._opened and same(sent[3], samples[3])
