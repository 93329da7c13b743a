"""Stored samples to training batches: packed to a token budget, in an order that is a function of the seed.

All epochs are planned before the first step, so step k always sees the same documents and a run resumed at
step k goes on exactly there. Documents are read from the store when their batch comes (memory-mapped). It
gives up shuffling inside documents: a document is the unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor

from hidden_state_cache import FeatureStore, StoredSample
from mtptrain.launch import ALONE, Ranks
from mtptrain.train.anchors import Anchors
from mtptrain.types import DraftBatch, UserError
from mtptrain.validate.simulated import pack


@dataclass(frozen=True)
class TapColumns:
    """Where a draft's features and the `final` tap stand in a stored row."""

    features: tuple[slice, ...]
    final: slice

    @classmethod
    def of(cls, store: FeatureStore, taps: tuple[str, ...]) -> TapColumns:
        """Raises UserError where the store lacks a tap."""
        places, at = {}, 0
        for tap in store.taps:
            places[tap.name] = slice(at, at + tap.width)
            at += tap.width
        missing = [t for t in (*taps, "final") if t not in places]
        if missing:
            raise UserError(
                f"the feature store holds {sorted(places)}, not {missing}; capture again with draft.taps={list(taps)}"
            )
        return cls(tuple(places[t] for t in taps), places["final"])

    def select(self, features: Tensor) -> Tensor:  # [T, stored] -> [T, W]
        parts = [features[:, s] for s in self.features]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def plan_batches(lengths: list[int], batch_tokens: int, epochs: int, seed: int) -> list[list[int]]:
    """Documents of every step of every epoch; a batch closes before it would exceed `batch_tokens`."""
    order = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(epochs):
        batch, rows = [], 0
        for index in torch.randperm(len(lengths), generator=order).tolist():
            if batch and rows + lengths[index] > batch_tokens:
                batches.append(batch)
                batch, rows = [], 0
            batch.append(index)
            rows += lengths[index]
        batches.append(batch)
    return batches


@dataclass(frozen=True)
class Share:
    """One rank's part: a step of the optimiser takes `accumulate` batches on each rank."""

    ranks: Ranks = ALONE
    accumulate: int = 1

    @property
    def batches(self) -> int:
        """Of one step, on all ranks."""
        return self.ranks.world * self.accumulate


UNSHARED = Share()
ALL_ROWS = Anchors()


class PlannedBatches:
    """Iterates one rank's batches from step `start` on; its length stays that of all steps, as Lightning counts.
    Batch a of step k on rank r is number (k * accumulate + a) * ranks + r of the plan, which begins again where
    more `steps` are asked for than it has."""

    def __init__(
        self,
        store: FeatureStore,
        columns: TapColumns,
        plan: list[list[int]],
        start: int,
        share: Share,
        steps: int | None = None,
        anchors: Anchors = ALL_ROWS,
    ) -> None:
        self.store, self.columns, self.start, self.share = store, columns, start, share
        self.anchors = anchors
        missing = -len(plan) % share.batches  # the last step is filled up from the first ones
        self.plan = plan + [plan[i % len(plan)] for i in range(missing)]
        self.steps = len(self.plan) // share.batches if steps is None else steps

    def __len__(self) -> int:
        return self.steps * self.share.accumulate

    def __iter__(self) -> Iterator[DraftBatch]:
        ranks, size = self.share.ranks, self.share.batches
        for number in range(self.start * size + ranks.rank, self.steps * size, ranks.world):
            yield self.anchors.of(self.batch(self._documents(number)), number)

    def _documents(self, number: int) -> list[int]:
        return self.plan[number % len(self.plan)]

    def whole_step(self, step: int) -> list[DraftBatch]:
        """Every rank's batches of one step, without features: what there is to count."""
        first = step * self.share.batches
        numbers = range(first, first + self.share.batches)
        light = (self._light(self._documents(number)) for number in numbers)
        return [self.anchors.of(*x) for x in zip(light, numbers, strict=True)]

    def _light(self, documents: list[int]) -> DraftBatch:
        tokens = [self.store.tokens(i) for i in documents]
        return pack([(ids, none := torch.empty(len(ids), 0), none, mask) for ids, mask in tokens])

    def state_dict(self) -> dict[str, int]:
        """Nothing: the plan is a function of the seed, and `start` comes from the checkpoint's step."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing; with `state_dict` it tells Lightning that resuming is taken care of."""

    def batch(self, documents: list[int]) -> DraftBatch:
        return pack([self._document(self.store[i]) for i in documents])

    def _document(self, sample: StoredSample) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        final = sample.features[:, self.columns.final]
        return sample.input_ids, self.columns.select(sample.features), final, sample.loss_mask


class StoreData(L.LightningDataModule):
    """Training batches, and a few held-out documents for the curve of acceptance length."""

    def __init__(
        self,
        store: FeatureStore,
        taps: tuple[str, ...],
        *,
        batch_tokens: int,
        epochs: int,
        held_out: int,
        seed: int,
        start: int = 0,
        share: Share = UNSHARED,
        steps: int | None = None,
        anchors: Anchors = ALL_ROWS,
    ) -> None:
        """`steps`: so many, through as many epochs as they take; None: those of `epochs`."""
        super().__init__()
        if held_out >= len(store):
            raise UserError(
                f"train.held_out={held_out} leaves nothing of {len(store)} samples to train on; lower it"
            )
        every = max(1, len(store) // held_out) if held_out else len(store) + 1
        kept_out = set(range(0, len(store), every)[:held_out])
        mine = [i for i in range(len(store)) if i not in kept_out]
        plan = plan_batches([store.lengths[i] for i in mine], batch_tokens, epochs, seed)
        columns = TapColumns.of(store, taps)
        named = [[mine[i] for i in batch] for batch in plan]
        self.batches = PlannedBatches(store, columns, named, start, share, steps, anchors)
        self.held_out = sorted(kept_out)

    def train_dataloader(self) -> PlannedBatches:
        return self.batches

    def held_out_batches(self) -> Iterator[DraftBatch]:
        for index in self.held_out:
            yield self.batches.batch([index])
