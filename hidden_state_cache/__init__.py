"""The on-disk feature store: hidden states of a target, kept once and read many times.

A store is a folder of safetensors shards and a `manifest.json` written last, so that the manifest's
presence means complete. `FeatureWriter` makes it (several ranks, resumable), `FeatureStore` reads
it (memory-mapped, random access), `verify` proves it. The package knows tensors and files only: no
target, no training, no config; that is why it depends on torch, numpy and safetensors alone and may
be used without the rest.
"""

from __future__ import annotations

from hidden_state_cache.codec import RowDtype
from hidden_state_cache.manifest import Manifest, ShardInfo, StoreError, StoreIdentity, TapSpec
from hidden_state_cache.reader import FeatureStore
from hidden_state_cache.shard import StoredSample
from hidden_state_cache.verify import VerifyResult, verify
from hidden_state_cache.writer import FeatureWriter

__all__ = [
    "FeatureStore",
    "FeatureWriter",
    "Manifest",
    "RowDtype",
    "ShardInfo",
    "StoreError",
    "StoreIdentity",
    "StoredSample",
    "TapSpec",
    "VerifyResult",
    "verify",
]
