"""The layout of one shard: many samples, concatenated, in one safetensors file.

Tensors: `features` [T, W], `scales` [T, L] (int8 and fp8 only), `input_ids` int32 [T], `loss_mask`
uint8 [T], `offsets` int64 [S + 1] (where each sample starts and ends); ids and categories are JSON
in the file's metadata. Concatenation keeps a sample one contiguous slice and a header small however
many samples there are. safetensors maps a file's tensors without reading them: opening costs the
header, a sample costs its pages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hidden_state_cache.codec import SCALED, TORCH_DTYPES, RowDtype, decode, encode, finite_rows
from hidden_state_cache.decode import shown
from hidden_state_cache.manifest import Manifest, ShardInfo, StoreError, one_line


@dataclass(frozen=True)
class StoredSample:
    """One sample of a store: its tokens and their features."""

    id: str
    category: str
    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    features: Tensor  # [T, W] any float dtype when written, float32 when read


@dataclass(frozen=True)
class Shard:
    """An opened shard. Its tensors are private views of the mapped file: never written back."""

    features: Tensor  # [T, W] as stored
    scales: Tensor | None  # [T, L] float32
    input_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] uint8
    offsets: list[int]  # S + 1
    ids: list[str]
    categories: list[str]

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample's `input_ids` and `loss_mask`, as copies."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return self.input_ids[rows].long(), self.loss_mask[rows].bool()

    def sample(self, index: int, widths: tuple[int, ...]) -> StoredSample:
        """Read one sample; its tensors are copies and outlive the file."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        scales = None if self.scales is None else self.scales[rows]
        input_ids, loss_mask = self.tokens(index)
        return StoredSample(
            id=self.ids[index],
            category=self.categories[index],
            input_ids=input_ids,
            loss_mask=loss_mask,
            features=decode(self.features[rows], scales, widths),
        )


def open_shard(folder: Path, info: ShardInfo, manifest: Manifest) -> Shard:
    """Map a shard: reads its header and offsets, no row.

    Raises StoreError where the file is not what `info` and the manifest describe.
    """
    try:
        opened: Any = safe_open(folder / info.file, framework="pt")  # its stub has no types
        with opened as file:
            return _map(file, _layout(info, manifest))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        fault = f"damaged ({one_line(error)}); delete it and capture again"
        raise StoreError(f"{folder / info.file}: {fault}") from error


def value_places(path: Path) -> dict[str, range]:
    """Where the bytes of each tensor lie in a shard's file, by its header; nothing where that is damaged."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(length, path.stat().st_size)))
        places = {name: header[name]["data_offsets"] for name in header if name != "__metadata__"}
        return {name: range(*(8 + length + x for x in at)) for name, at in places.items()}
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}


Layout = dict[str, tuple[list[int], torch.dtype]]


def _layout(info: ShardInfo, manifest: Manifest) -> Layout:
    """Shape and dtype that each tensor of the shard must have."""
    tokens, widths, scaled = info.tokens, manifest.identity.widths, manifest.dtype in SCALED
    layout: Layout = {
        "features": ([tokens, sum(widths)], TORCH_DTYPES[manifest.dtype]),
        "input_ids": ([tokens], torch.int32),
        "loss_mask": ([tokens], torch.uint8),
        "offsets": ([info.samples + 1], torch.int64),
    }
    return layout | ({"scales": ([tokens, len(widths)], torch.float32)} if scaled else {})


def _map(file: Any, layout: Layout) -> Shard:
    """Raises ValueError where the file is not of this layout, before anything is sized by it."""
    if set(file.keys()) != set(layout):
        raise ValueError(f"it holds {shown(sorted(file.keys()))}, not {sorted(layout)}")
    tensors: dict[str, Any] = {name: file.get_tensor(name) for name in layout}
    for name, (shape, dtype) in layout.items():
        found = (list(tensors[name].shape), tensors[name].dtype)
        if found != (shape, dtype):
            raise ValueError(f"{name} is {found} in it but {(shape, dtype)} in the manifest")
    names = json.loads(file.metadata()["samples"])
    offsets: list[int] = tensors["offsets"].tolist()
    _require_borders(offsets, layout["input_ids"][0][0])
    ids, categories = (_texts(names[key], len(offsets) - 1, key) for key in ("ids", "categories"))
    return Shard(
        tensors["features"],
        tensors.get("scales"),
        tensors["input_ids"],
        tensors["loss_mask"],
        offsets,
        ids,
        categories,
    )


def _require_borders(offsets: list[int], tokens: int) -> None:
    ordered = all(start <= stop for start, stop in pairwise(offsets))
    if not ordered or (offsets[0], offsets[-1]) != (0, tokens):
        raise ValueError(f"offsets do not divide {tokens} tokens")


def _texts(value: Any, count: int, key: str) -> list[str]:
    texts = cast("list[Any]", value if isinstance(value, list) else [])
    if len(texts) != count or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{key} are not {count} texts")
    return texts


def pack(samples: Sequence[StoredSample], dtype: RowDtype, widths: tuple[int, ...]) -> bytes:
    """The bytes of a shard file. Peak memory is some four times its size.

    Raises StoreError where a sample's shapes do not fit, or a row is not finite as stored.
    """
    encoded = [_encode(sample, dtype, widths) for sample in samples]
    lengths = torch.tensor([0] + [rows.shape[0] for rows, _ in encoded])  # [S + 1]
    tensors = {
        "features": torch.cat([rows for rows, _ in encoded]),  # [T, W]
        "input_ids": torch.cat([sample.input_ids.to("cpu", torch.int32) for sample in samples]),
        "loss_mask": torch.cat([sample.loss_mask.to("cpu", torch.uint8) for sample in samples]),
        "offsets": lengths.cumsum(0),
    }
    scales = [scale for _, scale in encoded if scale is not None]
    if scales:
        tensors["scales"] = torch.cat(scales)  # [T, L]
    names = {"ids": [s.id for s in samples], "categories": [s.category for s in samples]}
    # One key: safetensors orders several at random, and equal samples must give equal bytes.
    return save(tensors, {"samples": json.dumps(names, ensure_ascii=False)})


def _encode(
    sample: StoredSample, dtype: RowDtype, widths: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    tokens = sample.input_ids.numel()
    wanted = [(tokens,), (tokens,), (tokens, sum(widths))]
    found = [tuple(x.shape) for x in (sample.input_ids, sample.loss_mask, sample.features)]
    if found != wanted:
        fault = f"input_ids, loss_mask, features have shapes {found}, not {wanted}"
        raise StoreError(f"sample {sample.id!r}: {fault}; pass a row per token, taps side by side")
    rows, scales = encode(sample.features, dtype, widths)
    finite = finite_rows(rows, scales)
    if not finite.all():
        first = int((~finite).nonzero()[0])
        fault = f"row {first} is not finite as {dtype}; check the target, or store bf16"
        raise StoreError(f"sample {sample.id!r}: {fault}")
    return rows, scales
