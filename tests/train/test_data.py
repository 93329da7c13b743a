"""Stored samples to batches: a plan that is a function of the seed."""

from __future__ import annotations

import pytest
import torch

from hidden_state_cache import FeatureStore
from mtptrain.launch import Ranks
from mtptrain.train.data import Share, StoreData, TapColumns, plan_batches
from mtptrain.types import UserError


def test_every_epoch_sees_every_document_once() -> None:
    """Shuffled anew each epoch, the same for the same seed."""
    lengths = [3, 9, 4, 4, 12, 1, 7]
    plan = plan_batches(lengths, 12, epochs=3, seed=1)
    order = [i for batch in plan for i in batch]
    epochs = [order[k : k + 7] for k in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert plan == plan_batches(lengths, 12, 3, 1) != plan_batches(lengths, 12, 3, 2)


def test_a_batch_closes_before_it_would_exceed_its_budget() -> None:
    """Only a document that is longer by itself makes a longer batch, and it stands alone; none is empty."""
    lengths = [3, 9, 4, 4, 30, 1, 7]
    plan = plan_batches(lengths, 12, epochs=4, seed=0)
    for batch in plan:
        assert batch and (sum(lengths[i] for i in batch) <= 12 or batch == [4])


HOW = {"batch_tokens": 200, "epochs": 2, "held_out": 5, "seed": 0, "start": 0}


def _data(store: FeatureStore, **changes: int) -> StoreData:
    return StoreData(store, ("layer.1", "final"), **HOW | changes)


def test_held_out_documents_are_never_trained_on(store: FeatureStore) -> None:
    """They are spread over the store, and each is a batch of its own."""
    data = _data(store)
    trained = {i for batch in data.batches.plan for i in batch}
    assert len(data.held_out) == 5 and not trained & set(data.held_out)
    assert trained | set(data.held_out) == set(range(len(store)))
    assert max(data.held_out) > len(store) // 2
    assert len(list(data.held_out_batches())) == 5
    assert _data(store, held_out=0).held_out == []


def test_holding_out_everything_is_the_users_error(store: FeatureStore) -> None:
    """The message names the key and the number of samples."""
    with pytest.raises(UserError, match="train.held_out=24 leaves nothing of 24 samples"):
        _data(store, held_out=24)


def test_a_resumed_plan_goes_on_where_it_stopped(store: FeatureStore) -> None:
    """From step k on the batches are those of the uninterrupted plan; the length stays the whole plan's."""
    whole, rest = _data(store).batches, _data(store, start=4).batches
    assert len(rest) == len(whole)
    batches = list(whole)
    assert len(batches) == len(whole)
    for a, b in zip(batches[4:], rest, strict=True):
        assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.features, b.features)


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 2), (2, 1), (2, 3), (3, 40)])
def test_ranks_and_accumulation_share_one_plan(
    ranks: int, accumulate: int, store: FeatureStore
) -> None:
    """A step's batches are next to each other in the plan; together the ranks see each of them once, and the
    last step is filled up from the first ones. A resumed rank goes on at its step."""
    plan = _data(store).batches.plan
    size = ranks * accumulate
    for rank in range(ranks):
        share = Share(Ranks(rank, ranks, ranks), accumulate)
        batches = StoreData(store, ("final",), **HOW, share=share).batches
        assert batches.plan[: len(plan)] == plan and len(batches.plan) % size == 0
        assert batches.plan[len(plan) :] == (plan * size)[: len(batches.plan) - len(plan)]
        mine = [b.input_ids.tolist() for b in batches]
        assert len(mine) == len(batches) == batches.steps * accumulate
        later = StoreData(store, ("final",), **HOW | {"start": 1}, share=share).batches
        assert [b.input_ids.tolist() for b in later] == mine[accumulate:]
        for step in range(batches.steps):
            whole = [b.input_ids.tolist() for b in batches.whole_step(step)]
            assert whole[rank::ranks] == mine[step * accumulate :][:accumulate]


def test_a_whole_step_is_counted_without_features(store: FeatureStore) -> None:
    """Tokens, masks and borders are those of the batches themselves."""
    batches = StoreData(store, ("final",), **HOW, share=Share(accumulate=2)).batches
    for light, batch in zip(batches.whole_step(1), list(batches)[2:4], strict=True):
        assert light.features.numel() == light.final.numel() == 0
        for name in ("input_ids", "loss_mask", "cu_seqlens"):
            assert torch.equal(getattr(light, name), getattr(batch, name))


def test_a_batch_is_what_the_store_holds(store: FeatureStore) -> None:
    """Documents side by side with their own borders, the asked taps in the asked order, `final` beside them."""
    data = StoreData(store, ("final", "layer.1"), batch_tokens=200, epochs=1, held_out=0, seed=0)
    for documents, batch in zip(data.batches.plan, data.batches, strict=True):
        lens = torch.diff(batch.cu_seqlens).tolist()
        parts = zip(
            documents,
            batch.input_ids.split(lens),
            batch.features.split(lens),
            batch.final.split(lens),
            strict=True,
        )
        for index, ids, features, final in parts:
            sample = store[index]
            layer, _, _, last = sample.features.split(64, -1)
            assert torch.equal(ids, sample.input_ids) and torch.equal(final, last)
            assert torch.equal(features, torch.cat([last, layer], -1))
        assert int(batch.loss_mask.sum()) == sum(int(store[i].loss_mask.sum()) for i in documents)


def test_a_tap_that_was_not_captured_is_the_users_error(store: FeatureStore) -> None:
    """The message says what there is and what to set."""
    with pytest.raises(UserError, match=r"not \['layer.0'\]; capture again with draft.taps="):
        TapColumns.of(store, ("layer.1", "layer.0"))
