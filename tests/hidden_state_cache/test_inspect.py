"""What people are told of a store, whole or damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hidden_state_cache import StoredSample, StoreError
from hidden_state_cache.inspect import describe

WriteStore = Callable[..., list[StoredSample]]


def test_a_sound_store_is_summed_up_proved_and_sampled(
    tmp_path: Path, write_store: WriteStore
) -> None:
    """Target, taps, dtype and totals are there, the verification, and the first sample with its rows."""
    samples = write_store("int8", ranks=2)
    text = describe(tmp_path)
    for part in (
        "target     'acme/target', revision 'main', weights 'f00d'",
        "'layer.3' (pre norm, 8), 'final' (post norm, 5)",
        "int8, 13 wide",
        "8 samples",
        "in 4 shards",
        "verified   every checksum and every row of 4 shards",
        f"sample     {samples[0].id!r} ({samples[0].category!r}): 1 tokens, 1 of them supervised",
    ):
        assert part in text


def test_a_damaged_store_names_its_shards_and_shows_a_sound_one(
    tmp_path: Path, write_store: WriteStore
) -> None:
    """Each fault is a line, and the sample comes from a shard that can be read."""
    samples = write_store()
    first = tmp_path / "shard-0-0.safetensors"
    first.write_bytes(b"\xff" * first.stat().st_size)
    text = describe(tmp_path)
    assert "DAMAGED    1 of 2 shards\nshard-0-0.safetensors has checksum" in text
    assert f"sample     {samples[2].id!r}" in text
    (tmp_path / "shard-0-1.safetensors").unlink()
    text = describe(tmp_path)
    assert "shard-0-1.safetensors is missing" in text and "no shard can be read" in text


def test_a_folder_around_one_store_will_do(tmp_path: Path, write_store: WriteStore) -> None:
    """A stage's folder, in which the store is the only one, need not be entered."""
    write_store()
    inside = tmp_path / "features"
    inside.mkdir()
    for path in list(tmp_path.iterdir()):
        if path != inside:
            path.rename(inside / path.name)
    assert describe(tmp_path).startswith(f"store      {inside}\n")


@pytest.mark.parametrize("what", ["nothing", "a file", "damaged"])
def test_what_is_no_store_is_one_line(what: str, tmp_path: Path) -> None:
    """A path that is not there, a file, and a manifest that is none raise StoreError."""
    path = tmp_path / "store"
    if what == "a file":
        path.write_text("x")
    elif what == "damaged":
        path.mkdir()
        (path / "manifest.json").write_text("{}")
    with pytest.raises(StoreError) as caught:
        describe(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
