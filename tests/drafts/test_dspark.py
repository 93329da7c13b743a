"""DSpark: what the token before adds, how sure it is, what it shares, and the choices it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor, nn

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.compose import compose_config
from mtptrain.drafts.base import Draft, Proposal
from mtptrain.drafts.dspark import DSpark, DSparkConfig
from mtptrain.drafts.folder import contract
from mtptrain.losses.base import Loss
from mtptrain.losses.base.chunks import compute
from mtptrain.losses.confidence import Confidence
from mtptrain.losses.cross_entropy import CrossEntropy
from mtptrain.losses.kl import KL
from mtptrain.losses.tv import TV
from mtptrain.losses.weighted_sum import WeightedSum
from mtptrain.targets.base import Target
from mtptrain.types import Completion, DraftBatch, UserError
from mtptrain.validate.simulated import pack

SMALL = DSparkConfig(taps=("layer.1",), num_layers=2, markov_rank=5)


@pytest.fixture
def batch(answers: list[Completion], document: Callable[..., tuple[Tensor, ...]]) -> DraftBatch:
    return pack([document(c, SMALL.taps) for c in answers[:3]])  # pyright: ignore


def _shaken(config: DSparkConfig, target: Target) -> DSpark:
    torch.manual_seed(0)
    draft = config.build(target)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return draft


@pytest.mark.parametrize("vocab", [(), tuple(range(0, 512, 2))])
def test_logits_are_the_frozen_heads_and_a_map_of_the_token_before(
    vocab: tuple[int, ...], tiny_target: Target, batch: DraftBatch, backend: AttentionBackend
) -> None:
    """W z_k + W2 W1[x_{a+k}], slot by slot; the token before is the true one in training."""
    draft = _shaken(replace(SMALL, draft_vocab=vocab), tiny_target)
    rows = list(vocab) or slice(None)
    with torch.no_grad():
        steps = list(draft.unroll(batch, 3, batch.loss_mask, backend))
        for k, step in enumerate(steps):
            anchor = step.label_rows - 1 - k
            before = batch.input_ids[anchor + k]
            z = step.states[:, : tiny_target.hidden_size]
            expected = z @ tiny_target.head_weight[rows].T
            expected = expected + draft.markov_in.weight[before] @ draft.markov_out.weight.T
            got = F.linear(step.states, draft.head_rows())
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_an_untrained_correction_is_none(
    tiny_target: Target, batch: DraftBatch, backend: AttentionBackend
) -> None:
    """Tokens that training never saw before another keep a row of zeros, which adds nothing."""
    draft = SMALL.build(tiny_target)
    assert not bool(draft.correction(torch.arange(512)).any())
    assert bool(draft.markov_out.weight.any())  # else neither would ever move


def test_confidence_learns_without_teaching(
    tiny_target: Target, batch: DraftBatch, backend: AttentionBackend
) -> None:
    """It reads [state ; W1[x]], and no gradient leaves its own map."""
    draft = _shaken(SMALL, tiny_target)
    steps = list(draft.unroll(batch, 2, batch.loss_mask, backend))
    head = draft.confidence_head
    assert head is not None and draft.says_confidence
    for step in steps:
        assert step.confidence is not None
        expected = (step.states @ head.weight.T + head.bias).squeeze(1)
        torch.testing.assert_close(step.confidence, expected)
    torch.cat([s.confidence for s in steps if s.confidence is not None]).sum().backward()
    touched = {name for name, p in draft.named_parameters() if p.grad is not None}
    assert touched == {"confidence_head.weight", "confidence_head.bias"}


def test_a_trained_confidence_knows_its_acceptance(
    tiny_target: Target,
    backend: AttentionBackend,
    answers: list[Completion],
    document: Callable[..., Any],
    fit_head: Callable[..., Draft],
) -> None:
    """Fitted beside the rest, what it says of each slot is on average what is accepted there, and it is higher for
    rows that are accepted more often, though no more than a linear map of a moving state can tell in seconds."""
    parts: dict[str, Loss] = {"kl": KL(), "confidence": Confidence()}
    loss = WeightedSum(parts, dict.fromkeys(parts, 1.0))
    how = {"epochs": 40, "learning_rate": 5e-3, "unroll_steps": 4}
    draft = fit_head(replace(SMALL, taps=("layer.1", "layer.2")), loss, **how)
    batch = pack([document(c, draft.taps) for c in answers])
    seen = []
    with torch.no_grad():
        for step in draft.unroll(batch, 4, batch.loss_mask, backend):
            q = F.linear(step.states, draft.head_rows()).softmax(-1)
            p = tiny_target.logits(batch.final[step.target_rows]).softmax(-1)
            assert step.confidence is not None
            seen.append(torch.stack([step.confidence.sigmoid(), torch.minimum(p, q).sum(-1)]))
            sure, accepted = seen[-1].mean(1).tolist()
            assert sure == pytest.approx(accepted, abs=0.06)
    assert float(torch.corrcoef(torch.cat(seen, 1))[0, 1]) > 0.2


def test_a_confidence_tells_strong_rows_from_weak_ones(
    tiny_target: Target,
    backend: AttentionBackend,
    answers: list[Completion],
    document: Callable[..., Any],
    fit_head: Callable[..., Draft],
) -> None:
    """Beside a draft that stands still its loss leads to what a linear map can know of the acceptance."""
    parts: dict[str, Loss] = {"kl": KL(), "confidence": Confidence()}
    loss = WeightedSum(parts, dict.fromkeys(parts, 1.0))
    how = {"epochs": 40, "learning_rate": 5e-3, "unroll_steps": 4}
    draft = fit_head(replace(SMALL, taps=("layer.1", "layer.2")), loss, **how)
    batch = pack([document(c, draft.taps) for c in answers])
    with torch.no_grad():
        steps = list(draft.unroll(batch, 4, batch.loss_mask, backend))
        states = torch.cat([s.states for s in steps])
        final = batch.final[torch.cat([s.target_rows for s in steps])]
    head = nn.Linear(states.shape[1], 1)
    optimiser = torch.optim.LBFGS(head.parameters(), max_iter=60, line_search_fn="strong_wolfe")
    rows = (states, final, torch.zeros(len(states), dtype=torch.long), torch.ones(len(states)))

    def closure() -> Tensor:
        optimiser.zero_grad()
        columns = {"beside": draft.beside_head(), "confidence": head(states).squeeze(1)}
        total = compute(Confidence(), *rows, tiny_target.head_weight, **columns).loss / len(states)
        total.backward()
        return total

    torch.manual_seed(0)
    optimiser.step(closure)
    q = F.linear(states, draft.head_rows()).softmax(-1)
    accepted = torch.minimum(q, tiny_target.logits(final).softmax(-1)).sum(-1)
    sure = head(states).squeeze(1).sigmoid().detach()
    assert float(torch.corrcoef(torch.stack([sure, accepted]))[0, 1]) > 0.6


def test_its_recipe_of_losses_is_the_published_sum() -> None:
    """0.1 cross-entropy + 0.9 L1, which is twice the total variation, + 1.0 confidence."""
    loss = instantiate(compose_config("fit", ["loss=dspark"]).loss)
    assert loss.summands() == ((0.1, CrossEntropy()), (1.8, TV()), (1.0, Confidence()))


def _cut(least: float, sure: Sequence[Sequence[float] | None]) -> list[int]:
    chains = tuple(tuple(range(3)) for _ in sure)
    confidence = [None if x is None else torch.tensor(x) for x in sure]
    cut = Proposal(chains, confidence=confidence).cut(least)
    assert all(x == tuple(range(len(x))) for x in cut.token_ids)
    return [len(x) for x in cut.token_ids]


def test_a_chain_ends_before_it_becomes_too_unlikely() -> None:
    """By the product of all chances so far, also where a later token is sure; what says nothing stays whole."""
    sure = [[0.9, 0.5, 0.9], [0.4, 1.0, 1.0], [0.9, 0.9, 0.9], None]
    assert _cut(0.45, sure) == [2, 0, 3, 3]
    assert _cut(0.3, sure) == [3, 3, 3, 3]
    assert _cut(0.0, sure) == [3, 3, 3, 3]
    plain = Proposal(((1, 2), ()))
    assert plain.cut(0.9) is plain


def test_it_shares_head_and_embedding_and_saves_neither(tiny_target: Target) -> None:
    """Its own are the two maps of rank r and the map of its confidence, beside what every block head has."""
    draft = SMALL.build(tiny_target)
    promise = contract(draft, tiny_target, "f", "t", "k", "strip")
    assert set(promise.shared) == {"embedding", "lm_head"}
    assert promise.concat_order == ("feature",)  # no row reads an embedding beside a feature
    body = {name.split(".")[0] for name in draft.state_dict()}
    own = {"markov_in", "markov_out", "confidence_head"}
    assert body == {"fc", "context_norm", "layers", "norm"} | own
    sizes = {n: p.numel() for n, p in draft.named_parameters() if n.split(".")[0] in own}
    assert sum(sizes.values()) == 2 * 512 * 5 + 64 + 5 + 1
    assert draft.max_draft_tokens == 4  # the anchor's slot guesses too
    assert [id(x) for x in draft.tables()] == [
        id(draft.markov_in.weight),
        id(draft.markov_out.weight),
    ]


@pytest.mark.parametrize("rank", [0, 4097])
def test_a_rank_that_cannot_be_is_refused(rank: int) -> None:
    """One line that names it and what may be chosen."""
    with pytest.raises(UserError, match=f"draft.markov_rank={rank} must lie in 1 to 4096"):
        DSparkConfig(markov_rank=rank)
