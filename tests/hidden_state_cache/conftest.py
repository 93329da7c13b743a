"""A small store for the tests of this folder.

`write_store` writes real shards through the public writer, so that every test starts from what a
capture leaves behind; the two taps differ in width and magnitude. Given up: any target.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hidden_state_cache import FeatureWriter, RowDtype, StoredSample, StoreIdentity, TapSpec

WriteStore = Callable[..., list[StoredSample]]


@pytest.fixture
def identity() -> StoreIdentity:
    taps = (TapSpec("layer.3", 3, "pre", 8), TapSpec("final", None, "post", 5))
    return StoreIdentity(
        target_id="acme/target",
        target_revision="main",
        target_fingerprint="f00d",
        tokenizer_hash="t0",
        template_hash="c0",
        thinking="off",
        norm_kind="rms",
        norm_eps=1e-6,
        dataset_fingerprint="d0",
        taps=taps,
        mtptrain_version="0.1.0",
    )


@pytest.fixture
def make_sample(identity: StoreIdentity) -> Callable[[int], StoredSample]:
    """Sample number n: n % 3 + 1 tokens, bf16-representable features, unicode names."""

    def make(number: int) -> StoredSample:
        draw = torch.Generator().manual_seed(number)
        tokens = number % 3 + 1
        features = torch.randn(tokens, 13, generator=draw).bfloat16().float()  # [T, W]
        features[:, :8] *= 1024  # a tap of another magnitude
        return StoredSample(
            id=f"größe-{number}-数",
            category='code "ü" 🙂',
            input_ids=torch.randint(0, 50_000, (tokens,), generator=draw),
            loss_mask=torch.arange(tokens) % 2 == 0,
            features=features,
        )

    return make


@pytest.fixture
def write_store(
    tmp_path: Path, identity: StoreIdentity, make_sample: Callable[[int], StoredSample]
) -> WriteStore:
    """Write a complete store into tmp_path, two samples a shard; returns the samples in order."""

    def write(dtype: RowDtype = "bf16", ranks: int = 1, shards: int = 2) -> list[StoredSample]:
        samples = [make_sample(number) for number in range(2 * ranks * shards)]
        pairs = iter(zip(samples[::2], samples[1::2], strict=True))
        for rank in range(ranks):
            writer = FeatureWriter(tmp_path, identity, dtype, rank)
            for index in range(shards):
                writer.write_shard(index, next(pairs))
        FeatureWriter(tmp_path, identity, dtype).finish()
        return samples

    return write
