"""What a store is, for people: summary, verification, and one sample as it reads.

Reads everything once, as `verify` does. Names and texts of the store are shown as Python writes them, so
that a hostile one cannot drive the terminal. It gives up a choice of sample: the first that can be read.
"""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from hidden_state_cache.decode import shown
from hidden_state_cache.manifest import MANIFEST, Manifest, StoreError, StoreIdentity, TapSpec
from hidden_state_cache.reader import FeatureStore
from hidden_state_cache.shard import StoredSample
from hidden_state_cache.verify import VerifyResult, verify

_FAULTS = 20  # shown, of a store that is damaged all over


def describe(path: Path) -> str:
    """Lines about the store in `path`, or in the one folder inside `path` that holds a store.

    A damaged shard is a line of it. Raises StoreError where there is no complete store, or its
    manifest cannot be read.
    """
    folder = _store_in(path)
    manifest = Manifest.of_store(folder)
    proof = verify(folder, workers=os.cpu_count() or 1)
    lines = [f"store      {folder}", *_summary(manifest), *_verification(proof)]
    return "\n".join([*lines, *_sample(FeatureStore(folder, manifest))])


def _store_in(path: Path) -> Path:
    inner = [] if (path / MANIFEST).exists() else sorted(path.glob(f"*/{MANIFEST}"))
    return inner[0].parent if len(inner) == 1 else path


def _summary(manifest: Manifest) -> list[str]:
    rate = manifest.bytes / max(manifest.tokens, 1)
    return [
        *_identity(manifest.identity),
        f"rows       {manifest.dtype}, {sum(manifest.identity.widths):,} wide, {rate:,.0f} bytes a token",
        f"size       {manifest.samples:,} samples, {manifest.tokens:,} tokens, {manifest.bytes:,} bytes "
        f"in {len(manifest.shards):,} shards",
    ]


def _identity(identity: StoreIdentity) -> list[str]:
    taps = ", ".join(f"{shown(tap.name)} ({tap.norm} norm, {tap.width})" for tap in identity.taps)
    return [
        f"target     {shown(identity.target_id)}, revision {shown(identity.target_revision)}, "
        f"weights {shown(identity.target_fingerprint)}",
        f"text       tokenizer {shown(identity.tokenizer_hash)}, template {shown(identity.template_hash)}, "
        f"thinking {shown(identity.thinking)}, data {shown(identity.dataset_fingerprint)}",
        f"norm       {shown(identity.norm_kind)}, eps {identity.norm_eps:g}",
        f"taps       {taps}",
        f"written by mtptrain {shown(identity.mtptrain_version)}",
    ]


def _verification(proof: VerifyResult) -> list[str]:
    if proof.ok:
        return [f"verified   every checksum and every row of {proof.shards:,} shards"]
    more = len(proof.faults) - _FAULTS
    faults = [*proof.faults[:_FAULTS], *([f"and {more:,} more"] if more > 0 else [])]
    return [f"DAMAGED    {len(proof.faults):,} of {proof.shards:,} shards", *faults]


def _sample(store: FeatureStore) -> list[str]:
    """The first sample of the first shard that opens."""
    starts = [0, *accumulate(shard.samples for shard in store.manifest.shards[:-1])]
    for start in starts:
        try:
            return _shown_sample(store[start], store.identity)
        except StoreError:
            continue
    return ["sample     none: no shard can be read"]


def _shown_sample(sample: StoredSample, identity: StoreIdentity) -> list[str]:
    tokens, supervised = len(sample.input_ids), int(sample.loss_mask.sum())
    first: Any = sample.input_ids[:12]
    lines = [
        f"sample     {shown(sample.id)} ({shown(sample.category)}): {tokens:,} tokens, "
        f"{supervised:,} of them supervised",
        f"  ids      {first.tolist()}{' ...' if tokens > 12 else ''}",
    ]
    parts = sample.features.split_with_sizes(identity.widths, 1)
    return [*lines, *map(_tap, identity.taps, parts if tokens else ())]


def _tap(tap: TapSpec, rows: Tensor) -> str:
    size, largest = float(rows.pow(2).sum(1).sqrt().mean()), float(rows.abs().amax())
    return f"  {shown(tap.name)}: mean norm of a row {size:.4g}, largest value {largest:.4g}"
