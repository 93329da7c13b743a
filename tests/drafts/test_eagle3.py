"""The EAGLE-3 head: where it taps and starts, what its attention reads, and the choices it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext
from mtptrain.drafts.base.beside import read_both
from mtptrain.drafts.eagle3 import Eagle3Config
from mtptrain.drafts.folder import contract
from mtptrain.targets.base import Target, place_taps
from mtptrain.types import Completion, DraftBatch, UserError
from mtptrain.validate.simulated import pack

RECIPE = Path(__file__).parents[2] / "recipes" / "draft" / "eagle3.yaml"
THREE = ("layer.0", "layer.1", "layer.2")
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LATENT = {
    **SHAPE,
    "num_key_value_heads": 6,
    "head_dim": 4,  # of the rotated part
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,  # as wide as a key, which this backend asks for
    "first_k_dense_replace": 4,
}
FAMILIES = {
    "plain": LlamaConfig(**SHAPE),
    "biases": Qwen2Config(**SHAPE),
    "qk-norm": Qwen3Config(**SHAPE),
    "window": MistralConfig(**SHAPE, sliding_window=7),
    "latent keys": DeepseekV3Config(**LATENT),
}


def _target(config: PretrainedConfig) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)  # biases and gains too: none is an identity
    return Target(model)


def _batch(target: Target, backend: AttentionBackend, taps: tuple[str, ...]) -> DraftBatch:
    lens = [11, 23]
    ids = torch.randint(0, target.vocab_size, (34,))
    positions = torch.cat([torch.arange(n) for n in lens])
    out = target.forward(ids, positions, ForwardContext.packed(backend, lens), taps)
    every = torch.ones(34).bool()
    borders = torch.tensor([0, *lens]).cumsum(0)
    return DraftBatch(ids, out.features.clone(), out.final.clone(), every, borders)


def _states(
    config: Eagle3Config, target: Target, batch: DraftBatch, backend: AttentionBackend
) -> list[Tensor]:
    with torch.no_grad():
        steps = config.build(target).unroll(batch, 3, batch.loss_mask, backend)
        return [step.states for step in steps]


@pytest.mark.parametrize(
    ("num_layers", "taps"), [(30, (1, 14, 26)), (32, (1, 15, 28)), (28, (1, 13, 24))]
)
def test_the_recipe_taps_where_the_paper_does(num_layers: int, taps: tuple[int, ...]) -> None:
    """Outputs of layers 1, n / 2 - 1 and n - 4, counted from 0."""
    recipe = instantiate(OmegaConf.load(RECIPE))
    assert place_taps(recipe.taps, num_layers) == tuple(f"layer.{k}" for k in taps)
    assert taps == (1, num_layers // 2 - 1, num_layers - 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_starts_as_the_targets_own_continuation(family: str, backend: AttentionBackend) -> None:
    """Tapped in front of the last layer, its first states are the target's own final features, whatever the
    family adds to its attention."""
    target = _target(FAMILIES[family])
    batch = _batch(target, backend, THREE)
    head = Eagle3Config(taps=THREE).build(target)
    with torch.no_grad():
        (step,) = head.unroll(batch, 1, batch.loss_mask, backend)
    expected = batch.final[step.target_rows - 1]
    torch.testing.assert_close(step.states, expected, atol=2e-5, rtol=1e-5)


def test_attention_reads_the_embedding_and_the_residual_does_not(
    tiny_target: Target, backend: AttentionBackend
) -> None:
    """Queries, keys and values are twice as wide, the embedding in front; while its half is zero no token
    matters, and the residual carries the state alone."""
    head = Eagle3Config(taps=("layer.2",), embedding_scale=0.5).build(tiny_target)
    attention, own = head.layer.self_attn, tiny_target.decoder.layers[3].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        wide, weight = getattr(attention, name).weight, getattr(own, name).weight
        assert torch.equal(wide, torch.cat([0.5 * weight, weight], 1)) and wide.requires_grad
    assert torch.equal(attention.o_proj.weight, own.o_proj.weight)
    batch = _batch(tiny_target, backend, ("layer.2",))
    other = replace(batch, input_ids=(batch.input_ids + 1) % 512)
    for scale, same in ((0.0, True), (0.5, False)):
        config = Eagle3Config(taps=("layer.2",), embedding_scale=scale)
        a, b = (_states(config, tiny_target, x, backend)[0] for x in (batch, other))
        assert torch.equal(a, b) is same


def test_what_is_fed_back(tiny_target: Target, backend: AttentionBackend) -> None:
    """Raw or normed, the head first reads the same normed state; only what the next step goes on from differs."""
    batch = _batch(tiny_target, backend, THREE)
    raw, normed = (
        _states(Eagle3Config(taps=THREE, feedback=way), tiny_target, batch, backend)
        for way in ("raw", "normed")
    )
    assert torch.equal(raw[0], normed[0])
    assert not torch.allclose(raw[1], normed[1], atol=1e-2)


def test_tap_norms_keep_the_size_of_the_tap_it_goes_on_from(tiny_target: Target) -> None:
    """Every tap is normed before `fc`; the last one gets back its median size, unless the layer that follows
    is not the one behind it."""
    features = torch.randn(9, 192)
    features[:, 128:] *= 7 / features[:, 128:].pow(2).mean(-1, keepdim=True).sqrt()
    features[0] *= 1000
    for init_layer, size in ((None, 7.0), (0, 1.0)):
        head = Eagle3Config(taps=THREE, tap_norms=True, init_layer=init_layer).build(tiny_target)
        head.calibrate(features)
        gains = [norm.weight.detach() for norm in head.tap_norms if isinstance(norm, nn.RMSNorm)]
        wanted = [torch.full((64,), x) for x in (1.0, 1.0, size)]
        torch.testing.assert_close(gains, wanted)
        state = head.first_state(features)[1:]
        torch.testing.assert_close(state.pow(2).mean(-1).sqrt(), torch.full((8,), size))
    bare = Eagle3Config(taps=THREE).build(tiny_target)
    bare.calibrate(features)
    assert torch.equal(bare.first_state(features), features[:, 128:])


def test_an_own_head_starts_as_the_targets_rows_and_is_not_shared(tiny_target: Target) -> None:
    """It is a trained fp32 copy of the rows it scores; the frozen ones stay the teacher's, and the contract
    names no shared `lm_head`."""
    head = Eagle3Config(taps=THREE, head="own", draft_vocab=(3, 5, 400)).build(tiny_target)
    own = head.own_head()
    assert own is not None and own is head.head_rows() and own.requires_grad
    assert torch.equal(own, tiny_target.head_weight[[3, 5, 400]])
    with torch.no_grad():
        own.add_(1)
    assert torch.equal(head.frozen_rows(), tiny_target.head_weight[[3, 5, 400]])
    assert set(contract(head, tiny_target, "f", "t", "k", "strip").shared) == {"embedding"}
    shared = Eagle3Config(taps=THREE).build(tiny_target)
    assert shared.own_head() is None and shared.head_rows() is tiny_target.head_weight
    assert "lm_head" in contract(shared, tiny_target, "f", "t", "k", "strip").shared


def test_one_tap_or_many(
    tiny_target: Target,
    backend: AttentionBackend,
    answers: list[Completion],
    document: Callable[..., tuple[Tensor, ...]],
) -> None:
    """Any number of taps is fused; taps that `fc` starts without change nothing at the start."""
    alone, beside = ("layer.2",), ("layer.1", "final", "layer.2")
    one, many = (pack([document(answers[0], taps)]) for taps in (alone, beside))  # pyright: ignore
    a = _states(Eagle3Config(taps=alone), tiny_target, one, backend)
    b = _states(Eagle3Config(taps=beside), tiny_target, many, backend)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"feedback": "both"}, "draft.feedback=both is unknown; use raw or normed"),
        ({"head": "mine"}, "draft.head=mine is unknown; use shared or own"),
    ],
)
def test_choices_that_are_not_are_refused(choice: dict[str, str], message: str) -> None:
    """A mistyped choice is one line that names it and what may be chosen."""
    with pytest.raises(UserError, match=message):
        Eagle3Config(**choice)  # pyright: ignore


def test_an_attention_without_known_maps_is_refused() -> None:
    """A family whose attention cannot be widened is named, with the head that needs no widening."""
    with pytest.raises(UserError, match="no query, key or value map in Module; use draft=mtp"):
        read_both(nn.Module(), 0.0)
