"""What int8 and fp8 rows cost: the acceptance length of a trained head read from rows of fewer bits.

The head and the store are those of a run folder. Stored documents are walked as the held-out curve of
training does (simulated, greedy), once with the rows as stored and once with the same rows re-encoded. It
gives up training on such rows: the head was fitted to the stored ones, so this is the cost at reading.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from hidden_state_cache import FeatureStore, RowDtype, StoredSample
from hidden_state_cache.codec import decode, encode
from mtptrain.datasets.base import evenly
from mtptrain.drafts.base import Draft
from mtptrain.drafts.folder import load_draft
from mtptrain.session import Session
from mtptrain.train.data import TapColumns
from mtptrain.types import Completion, Request
from mtptrain.validate.acceptance import measure_acceptance
from mtptrain.validate.simulated import simulate

QUANTISED: tuple[RowDtype, ...] = ("int8", "fp8")


def acceptance_lengths(run_dir: Path, documents: int) -> dict[str, float]:
    """Simulated acceptance length of the run's head by row dtype, over so many stored documents."""
    config = OmegaConf.load(run_dir / "recipe.yaml")
    assert isinstance(config, DictConfig)
    session = Session(config)
    store = FeatureStore.open(session.store_folder)
    draft = load_draft(session.draft_folder, session.target)
    depth = int(config.num_draft_tokens)
    samples = [store[i] for i in evenly(range(len(store)), documents)]
    lengths = {
        store.manifest.dtype: _length(draft, samples, store, depth, session, lambda x: x),
    }
    for dtype in QUANTISED:
        lengths[dtype] = _length(draft, samples, store, depth, session, _rounded(dtype, store))
    return lengths


def _rounded(dtype: RowDtype, store: FeatureStore) -> Callable[[Tensor], Tensor]:
    widths = store.identity.widths
    return lambda features: decode(*encode(features, dtype, widths), widths)


def _length(
    draft: Draft,
    samples: list[StoredSample],
    store: FeatureStore,
    depth: int,
    session: Session,
    rows: Callable[[Tensor], Tensor],
) -> float:
    columns = TapColumns.of(store, draft.taps)
    read = [
        _completion(s, columns.select(rows(s.features)).to(session.target.device)) for s in samples
    ]
    walked = list(simulate(draft, read, depth, session.backend))
    return measure_acceptance(walked, depth).acceptance_length.value or 1.0


def _completion(sample: StoredSample, features: Tensor) -> Completion:
    """A stored sample, one answer at its end, as the walk takes it."""
    ids, answer = tuple(sample.input_ids.tolist()), int(sample.loss_mask.int().argmax())
    request = Request(sample.id, sample.category, ids[:answer])
    return Completion(request, ids[answer:], (), 0, "length", features)


def main(run_dir: Path, documents: int) -> dict[str, float]:
    """Prints the table; returns the loss in percent by dtype."""
    torch.set_grad_enabled(False)
    lengths = acceptance_lengths(run_dir, documents)
    stored, best = next(iter(lengths.items()))
    losses = {dtype: 100 * (1 - value / best) for dtype, value in lengths.items()}
    print(
        f"simulated acceptance length over up to {documents} stored documents, rows stored as {stored}"
    )
    for dtype, value in lengths.items():
        print(f"  {dtype:<5} {value:.4f}  loss {losses[dtype]:+.3f} %")
    return {dtype: round(losses[dtype], 3) for dtype in QUANTISED}
