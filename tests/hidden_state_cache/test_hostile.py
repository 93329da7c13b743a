"""A store that someone has made to be read by us: StoreError in one line, or it is as good as it says.

Manifests, sidecars and shard headers are mutated at random (hypothesis) and by hand where a number would size
memory or a loop. A case is a millisecond: no rows, no forward pass. 1,700 cases in all.
"""

from __future__ import annotations

import copy
import json
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hidden_state_cache import (
    FeatureStore,
    FeatureWriter,
    Manifest,
    StoreError,
    StoreIdentity,
    TapSpec,
    verify,
)
from hidden_state_cache.inspect import describe

WHERE = Path("store/manifest.json")
TAPS = (TapSpec("layer.3", 3, "pre", 8), TapSpec("final", None, "post", 5))
IDENTITY = StoreIdentity("t", "r", "f", "k", "c", "off", "rms", 1e-6, "d", TAPS, "0")
MANY = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}

numbers = st.one_of(
    st.integers(-3, 3), st.sampled_from([2**31, 2**63, 2**64, 10**30, -(10**30), 1.5, 1e308])
)
texts = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["../../etc/passwd", "/dev/zero", "shard-0-0.json", "a\nb", "\x00", "\x1b[2J"]),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@contextmanager
def _folder() -> Iterator[Path]:
    """hypothesis calls a test many times: pytest's tmp_path would be one for all."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    return [here, *(place for key, x in inner for place in _places(x, (*here, key)))]


def _changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """The JSON value with another value at that place; `...` deletes it."""
    if not place:
        return None if new is ... else new
    changed = copy.deepcopy(value)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = new
    return changed


@st.composite
def mutated(draw: st.DrawFn, sound: Any) -> Any:
    """`sound` with one to three of its values replaced or deleted."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(_places(sound)))
        sound = _changed(sound, place, draw(st.one_of(values, st.just(...))))
    return sound


def _sound_store(folder: Path) -> dict[str, Any]:
    """A store of one shard, without torch's help; returns its manifest."""
    names = json.dumps({"ids": ["a", "b"], "categories": ["x", "x"]})
    tensors = {"features": ("BF16", [3, 13], 78), "input_ids": ("I32", [3], 12)}
    tensors |= {"loss_mask": ("U8", [3], 3), "offsets": ("I64", [3], 24)}
    header: dict[str, Any] = {"__metadata__": {"samples": names}}
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    body = bytes(at - 24) + struct.pack("<3q", 0, 1, 3)
    return _store_of(folder, header, body)


def _store_of(folder: Path, header: Any, body: bytes) -> dict[str, Any]:
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + body
    (folder / "shard-0-0.safetensors").write_bytes(data)
    shard = {"file": "shard-0-0.safetensors", "samples": 2, "tokens": 3, "bytes": len(data)}
    manifest = Manifest.of(IDENTITY, "bf16", [])
    raw = json.loads(manifest.to_json())
    raw |= {"shards": [shard | {"checksum": "sha256:0"}], "samples": 2, "tokens": 3}
    raw["bytes"] = len(data)
    (folder / "manifest.json").write_text(json.dumps(raw))
    return raw


with tempfile.TemporaryDirectory() as _name:  # plain data, made once
    SOUND = _sound_store(Path(_name))
    _DATA = (Path(_name) / "shard-0-0.safetensors").read_bytes()
_LENGTH = struct.unpack("<Q", _DATA[:8])[0]
HEADER, BODY = json.loads(_DATA[8 : 8 + _LENGTH]), _DATA[8 + _LENGTH :]


def _one_line(error: StoreError) -> None:
    text = str(error)
    assert "\n" not in text and "\x1b" not in text and 0 < len(text) < 4000


def test_the_sound_store_is_read(tmp_path: Path) -> None:
    """What is mutated below is a store that reads, so a refusal is the mutation's."""
    _sound_store(tmp_path)
    store = FeatureStore.open(tmp_path)
    assert [len(sample.input_ids) for sample in store] == [1, 2]


@settings(max_examples=800, **MANY)
@given(raw=mutated(SOUND))
def test_a_mutated_manifest_is_refused_in_one_line_or_true_to_its_totals(raw: Any) -> None:
    """Whatever a manifest says, it is either refused or its counts are small, whole and of this folder."""
    try:
        manifest = Manifest.from_json(json.dumps(raw), WHERE)
    except StoreError as error:
        return _one_line(error)
    for shard in manifest.shards:
        assert "/" not in shard.file and 0 <= shard.tokens <= shard.bytes
    assert manifest.samples == sum(shard.samples for shard in manifest.shards)


@settings(max_examples=200, **MANY)
@given(
    text=st.one_of(
        st.text(max_size=40), st.sampled_from(["[" * 10**5, "9" * 10**4, '{"a":' * 10**5])
    )
)
def test_what_is_no_json_is_refused_in_one_line(text: str) -> None:
    """Any text, also one nested a hundred thousand deep, is StoreError."""
    with pytest.raises(StoreError) as caught:
        Manifest.from_json(text, WHERE)
    _one_line(caught.value)


@settings(max_examples=400, **MANY)
@given(header=mutated(HEADER))
def test_a_mutated_shard_header_is_refused_in_one_line_or_reads(header: Any) -> None:
    """Lying shapes, offsets, dtypes and names: the store opens and each sample reads, or StoreError says why."""
    with _folder() as folder:
        _store_of(folder, header, BODY)
        try:
            samples = list(FeatureStore.open(folder))
        except StoreError as error:
            return _one_line(error)
    assert [tuple(sample.features.shape) for sample in samples] == [(1, 13), (2, 13)]


@settings(max_examples=200, **MANY)
@given(place=st.integers(0, len(_DATA) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found_and_never_a_crash(place: int, bit: int) -> None:
    """verify names the shard; reading it gives rows or StoreError."""
    with _folder() as folder:
        _sound_store(folder)
        data = bytearray(_DATA)
        data[place] ^= 1 << bit
        (folder / "shard-0-0.safetensors").write_bytes(data)
        assert not verify(folder).ok
        describe(folder)
        try:
            list(FeatureStore.open(folder))
        except StoreError as error:
            _one_line(error)


@settings(max_examples=100, **MANY)
@given(
    raw=mutated(SOUND), name=st.sampled_from(["shard-0-0.json", "shard-x.json", "shard-1-2-3.json"])
)
def test_a_mutated_sidecar_is_refused_in_one_line_or_ignored(raw: Any, name: str) -> None:
    """A writer that resumes among hostile sidecars refuses in one line, or knows no shard by them."""
    with _folder() as folder:
        (folder / name).write_text(json.dumps(raw))
        try:
            assert FeatureWriter(folder, IDENTITY, "bf16").completed() == frozenset()
        except StoreError as error:
            _one_line(error)


def _shape(name: str, shape: list[int]) -> Any:
    return _changed(HEADER, (name, "shape"), shape)


LIES: dict[str, Any] = {
    "offsets of 2**50 empty rows": _changed(
        _shape("offsets", [2**50, 0]), ("offsets", "data_offsets"), [93, 93]
    ),
    "features of 2**60 tokens": _shape("features", [2**60, 13]),
    "features of 2**60 empty rows": _shape("features", [2**60, 0]),
    "input ids without end": _shape("input_ids", [2**63]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_takes_no_memory(lie: str, tmp_path: Path) -> None:
    """In a process that may map 4 GB more than torch itself, a header that promises exabytes is one line."""
    _store_of(tmp_path, LIES[lie], BODY)
    code = (
        "import resource, sys; from pathlib import Path; import hidden_state_cache as h\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * 4096 + 2**32\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "try: list(h.FeatureStore.open(Path(sys.argv[1])))\n"
        "except h.StoreError as error: print('refused:', error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root)
    assert done.stdout.startswith("refused: ") and done.stdout.count("\n") == 1, done.stderr


@pytest.mark.parametrize("size", [0, 7, 8, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_a_lying_length_is_refused(size: int, tmp_path: Path) -> None:
    """The first eight bytes may promise any header; the file's size decides."""
    _sound_store(tmp_path)
    path = tmp_path / "shard-0-0.safetensors"
    path.write_bytes(struct.pack("<Q", size) + path.read_bytes()[8:])
    with pytest.raises(StoreError, match="shard-0-0.safetensors: damaged"):
        list(FeatureStore.open(tmp_path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 << 20  # KiB
