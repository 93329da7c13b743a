"""Which tokens a reduced vocabulary keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hidden_state_cache import FeatureStore
from mtptrain.drafts.dspark import DSparkConfig
from mtptrain.drafts.eagle3 import Eagle3Config
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.losses.base.chunks import compute
from mtptrain.losses.confidence import Confidence
from mtptrain.targets.base import Target
from mtptrain.train.data import TapColumns
from mtptrain.train.vocabulary import (
    AllTokens,
    SampledTokens,
    ScoredTokens,
    heaviest,
    token_weights,
)
from mtptrain.types import Completion, DraftBatch
from mtptrain.validate.simulated import pack


def _final(store: FeatureStore) -> slice:
    return TapColumns.of(store, ("final",)).final


@pytest.fixture(scope="module")
def weights(store: FeatureStore, tiny_target: Target) -> Tensor:
    return token_weights(store, _final(store), tiny_target)


def test_all_of_it(weights: Tensor) -> None:
    """0, or as many as there are, is no reduction."""
    for size in (0, 512, 9999):
        assert heaviest(weights, size) == ()


def test_ids_are_ascending_and_repeatable(
    store: FeatureStore, tiny_target: Target, weights: Tensor
) -> None:
    """The same store gives the same ids, each once, in the order that d2t needs."""
    ids = heaviest(weights, 60)
    assert len(set(ids)) == 60 and list(ids) == sorted(ids)
    assert ids == heaviest(token_weights(store, _final(store), tiny_target), 60)


def test_a_smaller_choice_is_part_of_a_larger_one(weights: Tensor) -> None:
    """Tokens are ranked once."""
    assert set(heaviest(weights, 20)) < set(heaviest(weights, 80))


def test_the_kept_tokens_carry_the_targets_mass(
    store: FeatureStore, tiny_target: Target, weights: Tensor
) -> None:
    """On answer rows they hold clearly more of the target's probability than as many of the most frequent tokens
    do, and nearly every token that was written."""
    ids = list(heaviest(weights, 120))
    counts, mass, written = torch.zeros(512), torch.zeros(512), torch.zeros(512)
    for sample in store:
        counts += sample.input_ids.bincount(minlength=512)
        answer = sample.loss_mask
        written += sample.input_ids[answer].bincount(minlength=512)
        mass += tiny_target.logits(sample.features[answer][:, _final(store)]).softmax(-1).sum(0)
    frequent = counts.topk(120).indices
    assert mass[ids].sum() > mass[frequent].sum() + 0.03 * mass.sum()
    assert written[ids].sum() / written.sum() > 0.97


# ---- what a step scores ----------------------------------------------------------------------------------


@pytest.fixture
def batch(answers: list[Completion], document: Callable[..., Any]) -> DraftBatch:
    return pack([document(c, ("final",)) for c in answers[:2]])


def test_all_tokens_are_those_that_the_draft_can_say(
    tiny_target: Target, batch: DraftBatch
) -> None:
    """Rows and places belong together; what the draft cannot say has no place."""
    draft = MTPConfig(draft_vocab=(3, 5, 8)).build(tiny_target)
    tokens = AllTokens(draft, 512).of(batch, 0)
    assert tokens.rows.equal(tiny_target.head_weight[[3, 5, 8]])
    assert tokens.index[[3, 5, 8, 4]].tolist() == [0, 1, 2, -1] and (tokens.index >= 0).sum() == 3


def test_a_step_scores_heavy_tokens_its_batch_and_some_drawn(
    tiny_target: Target, weights: Tensor, batch: DraftBatch
) -> None:
    """Every label has a place, the heaviest are always there, and over the steps every token is."""
    scoring, seen = SampledTokens(tiny_target.head_weight, weights, 64, seed=0), set[int]()
    for step in range(500):
        tokens = scoring.of(batch, step)
        ids = (tokens.index >= 0).nonzero().squeeze(1)
        assert tokens.rows.equal(tiny_target.head_weight[ids])
        assert tokens.index[ids].equal(torch.arange(len(ids)))
        assert set(heaviest(weights, 48)) | set(batch.input_ids.tolist()) <= set(ids.tolist())
        assert len(ids) <= 64 + len(batch.input_ids.unique())
        seen |= set(ids.tolist())
    assert seen == set(range(512))


def test_what_is_drawn_is_a_function_of_seed_and_step(
    tiny_target: Target, weights: Tensor, batch: DraftBatch
) -> None:
    """So a resumed run scores what it would have scored."""
    one, same, other = (SampledTokens(tiny_target.head_weight, weights, 64, s) for s in (0, 0, 1))
    assert one.of(batch, 7).index.equal(same.of(batch, 7).index)
    assert not one.of(batch, 7).index.equal(one.of(batch, 8).index)
    assert not one.of(batch, 7).index.equal(other.of(batch, 7).index)


def test_an_own_head_is_compared_on_its_own_tokens(
    tiny_target: Target, weights: Tensor, batch: DraftBatch
) -> None:
    """Its rows and the frozen ones stand at the same places, and no token outside it is scored or teaches."""
    vocab = heaviest(weights, 200)
    draft = Eagle3Config(head="own", draft_vocab=vocab).build(tiny_target)
    own = draft.own_head()
    assert own is not None
    with torch.no_grad():
        own.copy_(torch.randn_like(own))
    labels, seen = torch.arange(512), set[int]()
    sampled = SampledTokens(tiny_target.head_weight, weights, 64, 0, draft)
    for scoring in (AllTokens(draft, 512), sampled):
        assert scoring.teaches(labels).nonzero().squeeze(1).tolist() == list(vocab)
        for step in range(100):
            tokens = scoring.of(batch, step)
            ids = (tokens.index >= 0).nonzero().squeeze(1)
            seen |= set(ids.tolist())
            assert tokens.rows.equal(tiny_target.head_weight[ids])
            assert tokens.own_rows is not None and tokens.own_rows.requires_grad
            assert tokens.own_rows.equal(own[torch.searchsorted(torch.tensor(vocab), ids)])
            labelled = batch.input_ids[scoring.teaches(batch.input_ids)]
            assert bool((tokens.index[labelled] >= 0).all())
    assert seen == set(vocab)


def test_trained_columns_stand_beside_the_rows_that_are_scored(
    tiny_target: Target, weights: Tensor, batch: DraftBatch
) -> None:
    """Row for row those of the same tokens; a draft that trains some is compared on its own tokens only."""
    vocab = heaviest(weights, 200)
    draft = DSparkConfig(num_layers=1, markov_rank=3, draft_vocab=vocab).build(tiny_target)
    columns, own = draft.beside_head(), torch.tensor(vocab)
    assert columns is not None
    sampled = SampledTokens(tiny_target.head_weight, weights, 64, 0, draft)
    for scoring in (AllTokens(draft, 512), sampled):
        tokens = scoring.of(batch, 3)
        ids = (tokens.index >= 0).nonzero().squeeze(1)
        assert set(ids.tolist()) <= set(vocab) and tokens.own_rows is None
        assert tokens.rows.equal(tiny_target.head_weight[ids])
        assert tokens.beside is not None and tokens.beside.requires_grad
        assert tokens.beside.equal(columns[torch.searchsorted(own, ids)])


def test_acceptance_on_a_sample_is_that_of_the_whole(
    tiny_target: Target, weights: Tensor, batch: DraftBatch
) -> None:
    """What a confidence is held against does not depend on how many tokens are scored: a drawn one counts as all it
    stands for, and the counts add up to all that the draft can say. Without them it is well above."""
    vocab = heaviest(weights, 400)
    draft = DSparkConfig(num_layers=1, markov_rank=3, draft_vocab=vocab).build(tiny_target)
    scoring = SampledTokens(tiny_target.head_weight, weights, 120, 0, draft)
    final = batch.final[:256] / 2  # flat laws, with a part in their tails
    states = torch.cat([final, torch.ones(len(final), 3)], -1)
    with torch.no_grad():  # the draft differs from the target in the tail alone
        tail = ~torch.isin(torch.tensor(vocab), scoring.core)
        noise = 0.6 * torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
        draft.markov_out.weight.copy_(noise * tail[:, None])
    few = replace(batch, input_ids=batch.input_ids[:8])

    def accepted(tokens: ScoredTokens, counts: Tensor | None) -> float:
        rows = (states, final, torch.zeros(len(final), dtype=torch.long), torch.ones(len(final)))
        how = {"beside": tokens.beside, "confidence": states[:, 0], "stands_for": counts}
        return float(compute(Confidence(), *rows, tokens.rows, **how).acceptance) / len(final)

    whole = accepted(AllTokens(draft, 512).of(few, 0), None)
    steps = [scoring.of(few, step) for step in range(100)]
    for tokens in steps:
        assert tokens.stands_for is not None
        assert float(tokens.stands_for.sum()) == pytest.approx(400, rel=1e-5)
    right = [accepted(tokens, tokens.stands_for) for tokens in steps]
    plain = [accepted(tokens, None) for tokens in steps]
    assert sum(right) / 100 == pytest.approx(whole, abs=0.03)
    assert sum(plain) / 100 > whole + 0.15
