"""Which tokens a reduced vocabulary keeps."""

from __future__ import annotations

import torch

from hidden_state_cache import FeatureStore
from mtptrain.targets.base import Target
from mtptrain.train.data import TapColumns
from mtptrain.train.vocabulary import choose_vocabulary


def _final(store: FeatureStore) -> slice:
    return TapColumns.of(store, ("final",)).final


def test_all_of_it(store: FeatureStore, tiny_target: Target) -> None:
    """0, or as many as there are, is no reduction."""
    for size in (0, 512, 9999):
        assert choose_vocabulary(store, _final(store), tiny_target, size) == ()


def test_ids_are_ascending_and_repeatable(store: FeatureStore, tiny_target: Target) -> None:
    """The same store gives the same ids, each once, in the order that d2t needs."""
    ids = choose_vocabulary(store, _final(store), tiny_target, 60)
    assert len(set(ids)) == 60 and list(ids) == sorted(ids)
    assert ids == choose_vocabulary(store, _final(store), tiny_target, 60)


def test_a_smaller_choice_is_part_of_a_larger_one(store: FeatureStore, tiny_target: Target) -> None:
    """Tokens are ranked once."""
    few, more = (set(choose_vocabulary(store, _final(store), tiny_target, n)) for n in (20, 80))
    assert few < more


def test_the_kept_tokens_carry_the_targets_mass(store: FeatureStore, tiny_target: Target) -> None:
    """On answer rows they hold clearly more of the target's probability than as many of the most frequent tokens
    do, and nearly every token that was written."""
    ids = list(choose_vocabulary(store, _final(store), tiny_target, 120))
    counts, mass, written = torch.zeros(512), torch.zeros(512), torch.zeros(512)
    for sample in store:
        counts += sample.input_ids.bincount(minlength=512)
        answer = sample.loss_mask
        written += sample.input_ids[answer].bincount(minlength=512)
        mass += tiny_target.logits(sample.features[answer][:, _final(store)]).softmax(-1).sum(0)
    frequent = counts.topk(120).indices
    assert mass[ids].sum() > mass[frequent].sum() + 0.03 * mass.sum()
    assert written[ids].sum() / written.sum() > 0.97
