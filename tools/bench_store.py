"""How small and how fast the feature store is, beside raw memory-mapped reading of the same bytes.

It writes a synthetic store of 64k tokens at width 576, then reads it sample by sample in a random
order, page cache warm, one thread, median of three runs. The store hands out float32 features, so
the reference does too: `np.memmap` of the same bytes (rows, ids, mask) at known places, and the one
cast straight out of the mapping (int8: and one multiplication) that anyone would write by hand; so
the ratio is the cost of bookkeeping. The bare copy of those bytes, no conversion, is shown as well.
Rates are per second of CPU time, because the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hidden_state_cache import (
    FeatureStore,
    FeatureWriter,
    RowDtype,
    StoredSample,
    StoreIdentity,
    TapSpec,
    verify,
)
from hidden_state_cache.codec import TORCH_DTYPES

WIDTH = 576
SAMPLES, TOKENS = 256, 256  # a sample has 256 tokens on average: 64k in all
SHARDS = 4
RUNS, PASSES = 3, 8  # a run reads the whole store PASSES times
DTYPES: tuple[RowDtype, ...] = ("fp32", "bf16", "int8")
TEXT = "synthetic"
TAP = TapSpec("final", None, "post", WIDTH)
IDENTITY = StoreIdentity(TEXT, TEXT, TEXT, TEXT, TEXT, "off", "rms", 1e-5, TEXT, (TAP,), "none")


@dataclass(frozen=True)
class Measured:
    """One store dtype; rates in MB/s of stored bytes."""

    bytes: int
    read: float  # by the store
    converted: float  # raw mapping, converted to float32
    copied: float  # raw mapping, copied as it is
    verify: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--run-dir", type=Path, help="measure the loss of this run's head instead")
    parser.add_argument("--documents", type=int, default=256, help="of the run's store")
    args = parser.parse_args()
    if args.run_dir is not None:
        return measure_loss(args.run_dir, args.documents)
    torch.set_num_threads(1)
    samples = make_samples()
    with tempfile.TemporaryDirectory() as folder:
        results: dict[RowDtype, Measured] = {
            dtype: measure(Path(folder) / dtype, dtype, samples) for dtype in DTYPES
        }
    print(f"{SAMPLES * TOKENS} tokens of width {WIDTH}, random order, median of {RUNS} runs, MB/s")
    titles = ("rows", "bytes", "store", "raw, as float32", "ratio", "raw copy", "verify")
    print("{:<6}{:>11}{:>9}{:>17}{:>8}{:>11}{:>9}".format(*titles))
    for dtype, m in results.items():
        rates = f"{m.read:9.0f}{m.converted:17.0f}{m.read / m.converted:8.2f}{m.copied:11.0f}"
        print(f"{dtype:<6}{m.bytes:11}{rates}{m.verify:9.0f}")
    summary = summarise(results)
    print(f"int8 / bf16 bytes: {summary['int8_bytes_ratio']}")
    print(json.dumps(summary))


def measure_loss(run_dir: Path, documents: int) -> None:
    """Loss of acceptance length in percent; the headline is int8, held to at most 0.5."""
    import store_loss  # imports the whole of mtptrain, which the rest of this benchmark does without

    losses = store_loss.main(run_dir, documents)
    last = {"name": "store_loss", "ours": losses["int8"], "reference": 0.5, "unit": "% of AL"}
    ratio = round(losses["int8"] / 0.5, 3)
    print(json.dumps(last | {"ratio": ratio, "machine": machine(), "fp8": losses["fp8"]}))


def summarise(results: dict[RowDtype, Measured]) -> dict[str, str | float]:
    """The last line. The headline is bf16, the dtype that GPU targets are captured in."""
    ratios = {dtype: round(m.read / m.converted, 3) for dtype, m in results.items()}
    return {
        "name": "store",
        "ours": round(results["bf16"].read),
        "reference": round(results["bf16"].converted),
        "unit": "MB/s",
        "ratio": ratios["bf16"],
        "machine": machine(),
        "fp32_ratio": ratios["fp32"],
        "int8_ratio": ratios["int8"],
        "int8_bytes_ratio": round(results["int8"].bytes / results["bf16"].bytes, 4),
        "verify_gb_per_s": round(min(m.verify for m in results.values()) / 1000, 2),
    }


def make_samples() -> list[StoredSample]:
    """Samples of 64 to 448 tokens, SAMPLES * TOKENS in all, normally distributed features."""
    draw = torch.Generator().manual_seed(0)
    half = torch.randint(64, 449, (SAMPLES // 2,), generator=draw)
    lengths = torch.cat([half, 2 * TOKENS - half]).tolist()
    return [
        StoredSample(
            id=str(number),
            category=TEXT,
            input_ids=torch.randint(0, 49152, (length,), generator=draw),
            loss_mask=torch.ones(length, dtype=torch.bool),
            features=torch.randn(length, WIDTH, generator=draw),  # [T, W]
        )
        for number, length in enumerate(lengths)
    ]


def measure(folder: Path, dtype: RowDtype, samples: list[StoredSample]) -> Measured:
    writer = FeatureWriter(folder, IDENTITY, dtype)
    for index in range(SHARDS):
        writer.write_shard(index, samples[index::SHARDS])
    size = writer.finish().bytes
    store = FeatureStore.open(folder)
    raw = RawReader(store, folder)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()
    calls = (store.__getitem__, raw.converted, raw.copied)
    reads = in_turn([lambda call=call: read_all(call, order) for call in calls], size * PASSES)
    (checked,) = in_turn([lambda: assert_whole(folder)], size)
    return Measured(size, reads[0], reads[1], reads[2], checked)


def in_turn(calls: list[Callable[[], None]], size: int) -> list[float]:
    """MB/s of each call over `size` bytes; runs alternate, so that drift hits all calls alike."""
    for call in calls:
        call()  # maps the pages, warms the allocator
    runs = [[size / 1e6 / cpu_seconds(call) for call in calls] for _ in range(RUNS)]
    return [statistics.median(rates) for rates in zip(*runs, strict=True)]


def read_all(call: Callable[[int], object], order: list[int]) -> None:
    for _ in range(PASSES):
        for index in order:
            call(index)  # dropped at once, as a trainer drops a sample once it is packed


def assert_whole(folder: Path) -> None:
    if faults := verify(folder).faults:
        raise SystemExit("\n".join(faults))


class RawReader:
    """The same samples read by hand: an np.memmap of each tensor, and known places."""

    def __init__(self, store: FeatureStore, folder: Path) -> None:
        self._kind = TORCH_DTYPES[store.manifest.dtype]
        self._places: list[tuple[dict[str, Tensor], slice]] = []
        for info in store.manifest.shards:
            tensors = map_tensors(folder / info.file, self._kind)
            offsets = tensors.pop("offsets").tolist()
            places = zip(offsets[:-1], offsets[1:], strict=True)
            self._places += [(tensors, slice(start, stop)) for start, stop in places]

    def copied(self, index: int) -> list[Tensor]:
        tensors, rows = self._places[index]
        return [tensor[rows].clone() for tensor in tensors.values()]

    def converted(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        tensors, rows = self._places[index]
        features = tensors["features"][rows].to(torch.float32, copy=True)  # [T, W]
        if "scales" in tensors:
            features.mul_(tensors["scales"][rows])
        return features, tensors["input_ids"][rows].long(), tensors["loss_mask"][rows].bool()


def map_tensors(path: Path, features: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, mapped by numpy at the place that its header gives."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    kinds = {"features": features, "scales": torch.float32, "input_ids": torch.int32}
    kinds |= {"loss_mask": torch.uint8, "offsets": torch.int64}
    tensors: dict[str, Tensor] = {}
    for name in kinds.keys() & header.keys():
        start, stop = header[name]["data_offsets"]
        raw = np.memmap(path, np.uint8, "c", 8 + length + start, (stop - start,))
        tensors[name] = torch.from_numpy(raw).view(kinds[name]).view(header[name]["shape"])
    return tensors


def cpu_seconds(call: Callable[[], None]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.processor()])[0]}, {os.cpu_count()} cores, one thread used"


if __name__ == "__main__":
    main()
