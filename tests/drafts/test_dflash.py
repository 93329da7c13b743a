"""DFlash: what each slot of a block sees, in training and over pages, and the choices it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext
from mtptrain.attention_backends.sdpa import SdpaBackend
from mtptrain.drafts.dflash import DFlashConfig
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.model_runner import ModelRunner
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target
from mtptrain.train.anchors import Anchors
from mtptrain.types import Completion, DraftBatch, Request, SamplingParams, UserError
from mtptrain.validate.simulated import pack

SMALL = DFlashConfig(taps=("layer.1", "layer.2"), num_layers=2, block_size=4)


class Probe(SdpaBackend):
    """Asks the backend which keys each query of a block sees: with queries of 0 every seen key weighs the same,
    and with values that name their keys the result says which they are."""

    def __init__(self) -> None:
        super().__init__()
        self.names = 1024
        self.masks: list[
            Tensor
        ] = []  # one a layer, [queries, keys]: context rows first, then the block's

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
        rows, own = sum(ctx.query_lens), 0 if ctx.keys_only else len(key)
        name = torch.arange(len(key)) + (0 if ctx.keys_only else rows)
        value = torch.nn.functional.one_hot(name, self.names).float()
        value = value[:, None].expand(-1, key.shape[1], -1)
        asked = torch.zeros(len(query), query.shape[1], self.names)
        out = super().attend(asked, torch.zeros_like(value), value, ctx, layer, 1.0, window)
        if not ctx.keys_only:
            self.masks.append(out[:, 0, : rows + own] > 0)
        return torch.zeros_like(query)


def _training_mask(batch: DraftBatch, rows: list[int], width: int) -> Tensor:
    """What DFlash says of the blocks of some packed rows, key by key: a slow, obvious loop."""
    total = len(batch.input_ids)
    borders = batch.cu_seqlens.tolist()
    document = [sum(t >= b for b in borders[1:]) for t in range(total)]
    mask = torch.zeros(len(rows) * width, total + len(rows) * width, dtype=torch.bool)
    for block, row in enumerate(rows):
        anchor = row + 1
        for slot in range(width):
            query = block * width + slot
            for key in range(total):
                mask[query, key] = document[key] == document[row] and key < anchor
            for other in range(len(rows)):
                for beside in range(width):
                    mask[query, total + other * width + beside] = other == block
    return mask


@pytest.fixture
def batch(answers: list[Completion], document: Callable[..., tuple[Tensor, ...]]) -> DraftBatch:
    return pack([document(c, SMALL.taps) for c in answers[:3]])  # pyright: ignore


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("anchors", [0, 4])
def test_the_mask_of_training_is_the_obvious_one(
    anchors: int, steps: int, tiny_target: Target, batch: DraftBatch
) -> None:
    """Entry by entry, in every layer: each slot sees the rows before its anchor, in its own document, and all of
    its own block; whether all rows draft or a few drawn ones."""
    drawn = Anchors(anchors).of(batch, 2)
    probe, draft = Probe(), SMALL.build(tiny_target)
    with torch.no_grad():
        first, *_ = draft.unroll(drawn, steps, drawn.loss_mask, probe)
    rows = (first.label_rows - 2).tolist()
    assert len(rows) == (3 * anchors if anchors else len(rows)) and len(rows) > 10
    expected = _training_mask(batch, rows, steps + 1)
    assert len(probe.masks) == 2
    for mask in probe.masks:
        assert torch.equal(mask, expected)


def test_the_mask_over_pages_is_the_same(
    tiny_target: Target,
    backend: AttentionBackend,
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows with true features leave keys and ask nothing; the block stands behind all of them, in as many rows as
    tokens are asked for and one more, and sees the whole of itself."""
    calls: list[tuple[list[int], list[int], list[Tensor], bool]] = []
    context = ModelRunner.context

    def spy(
        self: ModelRunner,
        sequences: object,
        first: list[int],
        lens: list[int],
        tails: list[Tensor] | None = None,
        keys_only: bool = False,
    ) -> ForwardContext:
        if self.draft is not None and sys._getframe(1).f_code.co_name in ("context", "keys_only"):
            calls.append((list(first), list(lens), list(tails or ()), keys_only))
        return context(self, sequences, first, lens, tails, keys_only)  # pyright: ignore

    monkeypatch.setattr(ModelRunner, "context", spy)
    limits = EngineLimits(num_draft_tokens=2, max_prefill_tokens=16)
    engine = Engine(tiny_target, backend, limits, frozenset(), SMALL.build(tiny_target))
    engine.generate(requests[:3], SamplingParams(max_new_tokens=12))
    blocks = [i for i, (_, _, _, keys_only) in enumerate(calls) if not keys_only]
    assert len(blocks) > 3 and len(calls) > 2 * len(blocks)  # prompts come in chunks
    for i in blocks:
        first, lens, tails, _ = calls[i]
        true_first, true_lens, none, keys_only = calls[i - 1]
        assert keys_only and not none
        assert first == [a + n for a, n in zip(true_first, true_lens, strict=True)]
        assert lens == [3] * len(first)
        assert all(torch.equal(t, torch.ones(3, 3, dtype=torch.bool)) for t in tails)


# ---- where it starts, what it costs ----------------------------------------------------------------------


def test_the_first_layer_reads_what_the_targets_own_reads(
    tiny_target: Target, batch: DraftBatch, backend: AttentionBackend
) -> None:
    """Before any training the keys of the context are those that the target's layer behind the last tap makes."""
    draft = DFlashConfig(taps=("layer.2",), num_layers=1).build(tiny_target)
    features = batch.features[:, -tiny_target.hidden_size :]
    theirs = tiny_target.decoder.layers[3]
    with torch.no_grad():
        expected = theirs.self_attn.k_proj(theirs.input_layernorm(features))
        got = draft.layers[0].self_attn.k_proj(draft.context_norm(draft.fc(features)))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("taps", "num_layers", "init_layer", "first"),
    [
        (("layer.0",), 2, None, 1),
        (("layer.1", "layer.2"), 2, None, 2),
        (("layer.2",), 3, None, 1),
        (("final",), 1, None, 3),
        (("layer.2",), 2, 0, 0),
    ],
)
def test_it_starts_as_the_layers_behind_the_last_tap(
    taps: tuple[str, ...], num_layers: int, init_layer: int | None, first: int, tiny_target: Target
) -> None:
    """Or earlier ones where too few follow, or those asked for; each has pages of its own behind the target's."""
    config = DFlashConfig(taps=taps, num_layers=num_layers, init_layer=init_layer)
    draft = config.build(tiny_target)
    assert config.first_layer(4) == first and draft.num_kv_layers == num_layers
    for i, layer in enumerate(draft.layers):
        theirs = tiny_target.decoder.layers[first + i].state_dict()
        assert all(torch.equal(x, theirs[name]) for name, x in layer.state_dict().items())
        assert layer.self_attn.layer_idx == 4 + i


def test_a_block_is_one_forward(
    tiny_target: Target, backend: AttentionBackend, requests: list[Request]
) -> None:
    """However many tokens a step drafts, for however many sequences, each layer's MLP runs once."""
    draft, runs = DFlashConfig(taps=("layer.2",), num_layers=2).build(tiny_target), list[int]()
    for layer in draft.layers:
        layer.mlp.register_forward_hook(lambda _, args, out: runs.append(args[0].shape[1]))
    engine = Engine(tiny_target, backend, EngineLimits(num_draft_tokens=4), frozenset(), draft)
    done = engine.generate(requests[:3], SamplingParams(max_new_tokens=9))
    steps = max(c.decode_steps for c in done)
    assert len(runs) == 2 * steps and max(runs) == 3 * 5


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"block_size": 1}, "draft.block_size=1 must lie in 2 to 64"),
        ({"block_size": 65}, "draft.block_size=65 must lie in 2 to 64"),
        ({"num_layers": 0}, "draft.num_layers=0 must lie in 1 to 4, the target's layers"),
        ({"num_layers": 5}, "draft.num_layers=5 must lie in 1 to 4, the target's layers"),
        ({"init_layer": 2}, "draft.init_layer=2 must lie in 0 to 1: 3 layers follow from it"),
        ({"mask_token_id": 512}, "draft.mask_token_id=512 must lie in 0 to 511"),
    ],
)
def test_choices_that_are_not_are_refused(
    choice: dict[str, object], message: str, tiny_target: Target
) -> None:
    """A choice that cannot be is one line that names it and what may be chosen."""
    with pytest.raises(UserError, match=message):
        DFlashConfig(**choice).build(tiny_target)  # pyright: ignore
