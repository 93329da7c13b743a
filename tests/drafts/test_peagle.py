"""P-EAGLE: what each row and each mask of a chain sees, in training and over pages, and where it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext
from mtptrain.attention_backends.sdpa import SdpaBackend
from mtptrain.drafts.base import Draw, Proposal, TrueRows
from mtptrain.drafts.peagle import PEagleConfig
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target
from mtptrain.train.anchors import Anchors
from mtptrain.types import Completion, DraftBatch, Request, SamplingParams, UserError
from mtptrain.validate.simulated import pack

SMALL = PEagleConfig(taps=("layer.1", "layer.2"), num_layers=2)
Place = tuple[int, int]  # packed anchor, depth


class Probe(SdpaBackend):
    """Asks the backend which keys each query sees: with queries of 0 every seen key weighs the same, and with
    values that name their keys the result says which they are."""

    def __init__(self, names: int) -> None:
        super().__init__()
        self.names, self.made = names, dict[int, int]()  # keys that each layer has left so far
        self.masks: dict[int, list[Tensor]] = {}  # of each layer, [queries, names] of each call

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ctx: ForwardContext,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        first = self.made.get(layer, 0)
        self.made[layer] = first + len(key)
        value = F.one_hot(torch.arange(len(key)) + first, self.names).float()
        value = value[:, None].expand(-1, key.shape[1], -1)
        asked = torch.zeros(len(query), query.shape[1], self.names)
        out = super().attend(asked, torch.zeros_like(value), value, ctx, layer, 1.0, window)
        seen = out[:, 0] > 0
        self.masks.setdefault(layer, []).append(seen)
        return torch.zeros_like(query)


def _training_mask(batch: DraftBatch, queries: Sequence[Place], keys: Sequence[Place]) -> Tensor:
    """What P-EAGLE says of each pair of rows, entry by entry: a slow, obvious loop."""
    borders = batch.cu_seqlens.tolist()
    document = [sum(t >= b for b in borders[1:]) for t in range(borders[-1])]
    mask = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for q, (anchor, depth) in enumerate(queries):
        for k, (other, behind) in enumerate(keys):
            true = behind == 0 and other <= anchor and document[other] == document[anchor]
            mask[q, k] = true or (other == anchor and behind <= depth)
    return mask


@pytest.fixture
def batch(answers: list[Completion], document: Callable[..., tuple[Tensor, ...]]) -> DraftBatch:
    return pack([document(c, SMALL.taps) for c in answers[:3]])  # pyright: ignore


@pytest.mark.parametrize("keep", [1.0, 0.6])
def test_the_mask_of_training_is_the_obvious_one(
    keep: float, tiny_target: Target, batch: DraftBatch
) -> None:
    """Entry by entry, in every layer: a row sees the true rows up to its anchor, in its own document, and its own
    chain up to itself; whether all chains go on or ever fewer do."""
    drawn = Anchors(keep=keep).of(batch, 4)
    total, steps = len(batch.input_ids), 4
    draft = SMALL.build(tiny_target)
    chains = draft.label_rows(drawn, steps, drawn.loss_mask)
    masks = [(int(t) - 2 - j, j) for j, rows in enumerate(chains) if j for t in rows]
    probe = Probe(total + len(masks))
    with torch.no_grad():
        list(draft.unroll(drawn, steps, drawn.loss_mask, probe))
    assert len({d for _, d in masks}) == 3 and len(masks) > 3 * 3
    answer = drawn.loss_mask.nonzero().squeeze(1)
    first = [int(answer[answer >= b][0]) - 1 for b in batch.cu_seqlens[:-1]]  # drafts first
    borders = batch.cu_seqlens.tolist()
    document = [sum(t >= b for b in borders[1:]) for t in range(total)]
    prompts = [t for t in range(total) if t < first[document[t]]]
    rest = [t for t in range(total) if t >= first[document[t]]]
    every = [(t, 0) for t in range(total)]
    keys = [*every, *masks]
    got = torch.cat(probe.masks[4])
    assert torch.equal(got, _training_mask(batch, keys, keys))
    keys = [*((t, 0) for t in (*prompts, *rest)), *masks]  # the last layer asks nothing for prompts
    got = torch.cat(probe.masks[5])
    expected = _training_mask(batch, keys, keys)
    assert torch.equal(got[len(prompts) :], expected[len(prompts) :])
    assert not got[: len(prompts)].any()


def test_a_proposal_is_one_causal_forward(
    tiny_target: Target, backend: AttentionBackend, requests: list[Request]
) -> None:
    """However many tokens a step drafts, for however many sequences, each layer's MLP runs once: over the true
    rows and the masks behind the last of them."""
    draft, runs = SMALL.build(tiny_target), list[int]()
    for layer in draft.layers:
        layer.mlp.register_forward_hook(lambda _, args, out: runs.append(args[0].shape[1]))
    engine = Engine(tiny_target, backend, EngineLimits(num_draft_tokens=4), frozenset(), draft)
    seen = list[tuple[tuple[int, ...], list[int]]]()
    propose = draft.propose

    def spy(rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        start = len(runs)
        proposal = propose(rows, num_draft_tokens, draw)
        seen.append((rows.lens, runs[start:]))
        return proposal

    draft.propose = spy
    engine.generate(requests[:3], SamplingParams(max_new_tokens=9))
    assert len(seen) > 1
    for lens, now in seen:
        assert now == [sum(lens) + 3 * len(lens)] * 2


def test_no_place_reads_what_was_drafted_before_it(
    tiny_target: Target, backend: AttentionBackend, batch: DraftBatch
) -> None:
    """Other tokens behind the anchor's next one change no state of the chain."""
    draft = SMALL.build(tiny_target)
    anchor = int(batch.loss_mask.nonzero()[0])
    ids = batch.input_ids.clone()
    ids[anchor + 2 : batch.cu_seqlens[1]] = 5
    other = replace(batch, input_ids=ids)
    with torch.no_grad():
        both = [list(draft.unroll(x, 4, batch.loss_mask, backend)) for x in (batch, other)]
    for a, b in zip(*both, strict=True):
        assert torch.equal(a.label_rows, b.label_rows)
        place = int((a.target_rows == a.target_rows.min()).nonzero()[0])
        torch.testing.assert_close(a.states[place], b.states[place])


# ---- where it starts, what it refuses --------------------------------------------------------------------


def test_it_starts_as_the_layers_behind_the_last_tap(
    tiny_target: Target, batch: DraftBatch, backend: AttentionBackend
) -> None:
    """On that tap it is the target's own continuation: the true rows' states are the target's final ones."""
    draft = PEagleConfig(taps=("layer.2",), num_layers=1).build(tiny_target)
    hidden = tiny_target.hidden_size
    alone = replace(batch, features=batch.features[:, -hidden:])
    with torch.no_grad():
        first, *_ = draft.unroll(alone, 2, batch.loss_mask, backend)
    torch.testing.assert_close(
        first.states, batch.final[first.label_rows - 2], atol=1e-4, rtol=1e-4
    )
    assert [layer.self_attn.layer_idx for layer in SMALL.build(tiny_target).layers] == [4, 5]


def test_a_mask_starts_as_a_feature_of_the_middle(tiny_target: Target, batch: DraftBatch) -> None:
    """However far off the scale the first token's is."""
    draft = SMALL.build(tiny_target)
    wild = batch.features.clone()
    wild[0] = 1e6
    draft.calibrate(wild)
    assert draft.mask_hidden.shape == (batch.features.shape[1],)
    below = (batch.features < draft.mask_hidden).float().mean(0)
    assert bool(((below > 0.4) & (below < 0.6)).all())


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"num_layers": 0}, "draft.num_layers=0 must lie in 1 to 4, the target's layers"),
        ({"num_layers": 5}, "draft.num_layers=5 must lie in 1 to 4, the target's layers"),
        ({"init_layer": 2}, "draft.init_layer=2 must lie in 0 to 1: 3 layers follow from it"),
        ({"mask_token_id": -1}, "draft.mask_token_id=-1 must lie in 0 to 511"),
    ],
)
def test_choices_that_are_not_are_refused(
    choice: dict[str, object], message: str, tiny_target: Target
) -> None:
    """A choice that cannot be is one line that names it and what may be chosen."""
    with pytest.raises(UserError, match=message):
        PEagleConfig(**choice).build(tiny_target)  # pyright: ignore
