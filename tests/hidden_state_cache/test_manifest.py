"""A manifest survives JSON, and refuses what it cannot vouch for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hidden_state_cache import Manifest, ShardInfo, StoreError, StoreIdentity, TapSpec

WHERE = Path("store/manifest.json")


@pytest.fixture
def manifest(identity: StoreIdentity) -> Manifest:
    shards = [ShardInfo(f"shard-0-{n}.safetensors", 2, 10, 200, "sha256:0") for n in range(3)]
    return Manifest.of(identity, "bf16", shards)


def test_json_round_trip(manifest: Manifest) -> None:
    """A manifest read back from its JSON is equal to it, totals included."""
    assert Manifest.from_json(manifest.to_json(), WHERE) == manifest
    assert (manifest.samples, manifest.tokens, manifest.bytes) == (6, 30, 600)


def test_another_format_version_is_refused_with_both(manifest: Manifest) -> None:
    """A store of another format version is refused, naming its version and ours."""
    text = replace(manifest, format_version=99).to_json()
    with pytest.raises(StoreError, match="format_version is 99 in the store but 1 was expected"):
        Manifest.from_json(text, WHERE)


@pytest.mark.parametrize("key", ["identity", "dtype", "shards", "tokens", "format_version"])
def test_a_damaged_manifest_is_named(manifest: Manifest, key: str) -> None:
    """A manifest that lacks a field raises StoreError naming the file, in one line."""
    raw = json.loads(manifest.to_json())
    del raw[key]
    with pytest.raises(StoreError, match="store/manifest.json: damaged") as caught:
        Manifest.from_json(json.dumps(raw), WHERE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"'])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    """JSON of another shape, or no JSON, raises StoreError."""
    with pytest.raises(StoreError, match="damaged"):
        Manifest.from_json(text, WHERE)


def test_totals_that_do_not_add_up_are_refused(manifest: Manifest) -> None:
    """A manifest whose totals are not the sum of its shards is refused."""
    with pytest.raises(StoreError, match="totals"):
        Manifest.from_json(replace(manifest, tokens=29).to_json(), WHERE)


def test_every_differing_field_is_named_with_both_values(identity: StoreIdentity) -> None:
    """Two identities that differ in a field and in a tap are refused, each with both values."""
    taps = (replace(identity.taps[0], norm="post"), *identity.taps[1:])
    found = replace(identity, norm_eps=1e-5, taps=taps)
    with pytest.raises(StoreError) as caught:
        identity.require(found, WHERE)
    assert "norm_eps is 1e-05 in the store but 1e-06 was expected" in str(caught.value)
    assert "taps[0].norm is 'post' in the store but 'pre' was expected" in str(caught.value)
    assert "target_id" not in str(caught.value)


def test_a_tap_more_is_a_mismatch(identity: StoreIdentity) -> None:
    """A store with a tap that was not expected is refused, naming the tap."""
    found = replace(identity, taps=(*identity.taps, TapSpec("final_prenorm", None, "pre", 5)))
    with pytest.raises(
        StoreError, match=r"taps\[2\].name is 'final_prenorm' in the store but None"
    ):
        identity.require(found, WHERE)
