"""The MTP head: its layers, what it starts from, and the choices it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base.joined_layer import JoinedLayer
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.targets.base import Target
from mtptrain.types import UserError


def _module(config: MTPConfig, target: Target, step: int = 0) -> JoinedLayer:
    module = config.build(target).steps[step]
    assert isinstance(module, JoinedLayer)
    return module


def test_restored_norms(tiny_target: Target) -> None:
    """DeepSeek's layout: both inputs and the output are normed, fc has no bias, and the layer is whole."""
    module = _module(MTPConfig(), tiny_target)
    assert isinstance(module.enorm, nn.RMSNorm) and isinstance(module.hnorm, nn.RMSNorm)
    assert module.fc.bias is None
    norm = type(tiny_target.decoder.norm)
    assert isinstance(module.norm, norm) and isinstance(module.layer.input_layernorm, norm)


def test_no_norms(tiny_target: Target) -> None:
    """EAGLE-1's layout: fc with bias, no norm before fc, before attention or before the head."""
    module = _module(MTPConfig(norms="none"), tiny_target)
    assert module.fc.bias is not None
    off = (module.enorm, module.hnorm, module.norm, module.layer.input_layernorm)
    assert all(isinstance(x, nn.Identity) for x in off)
    names = [n for n, _ in module.named_parameters() if "norm" in n]
    assert names == ["layer.post_attention_layernorm.weight"]


def test_a_head_starts_as_the_targets_own_layer(
    tiny_target: Target, backend: AttentionBackend
) -> None:
    """fc passes the feature through, so the first state of the head is layer and norm of the target on the
    target's own state; the copies are the head's and fp32, the target's stay frozen."""
    module = _module(MTPConfig(norms="none", init_layer=1), tiny_target)
    state, embedding = torch.randn(5, 64), torch.randn(5, 64)
    torch.testing.assert_close(module.fc(torch.cat([embedding, state], -1)), state)
    own = dict(tiny_target.decoder.layers[1].named_parameters())
    for name, p in module.layer.named_parameters():
        assert torch.equal(p, own[name]) and p.requires_grad and not own[name].requires_grad
    with torch.no_grad():
        next(module.layer.parameters()).add_(1)
    assert not torch.equal(next(module.layer.parameters()), next(iter(own.values())))


@pytest.mark.parametrize(
    ("taps", "init_layer", "first"),
    [
        (("layer.1",), None, 2),
        (("final", "layer.0"), None, 1),
        (("layer.3",), None, 0),
        (("final",), None, 0),
        (("layer.1",), 3, 3),
    ],
)
def test_a_head_goes_on_where_its_tap_ends(
    taps: tuple[str, ...], init_layer: int | None, first: int, tiny_target: Target
) -> None:
    """It starts from the layer behind its last tap, unless nothing follows or another one is asked for."""
    config = MTPConfig(taps=taps, init_layer=init_layer)
    assert config.first_layer(4) == first
    own = tiny_target.decoder.layers[first].mlp.up_proj.weight
    assert _module(config, tiny_target).layer.mlp.up_proj.weight.equal(own)


def test_a_continued_tap_keeps_its_size(tiny_target: Target) -> None:
    """`hnorm` takes the median size of the last tap, outliers left out; where the head does not go on from its
    tap it starts at one."""
    features = torch.randn(9, 128)
    features[:, 64:] *= 7 / features[:, 64:].pow(2).mean(-1, keepdim=True).sqrt()
    features[0] *= 1000
    head = MTPConfig(taps=("final", "layer.1")).build(tiny_target)
    other = MTPConfig(taps=("final", "layer.1"), init_layer=0).build(tiny_target)
    for draft, size in ((head, 7.0), (other, 1.0)):
        draft.calibrate(features)
        module = draft.steps[0]
        assert isinstance(module, JoinedLayer) and isinstance(module.hnorm, nn.RMSNorm)
        torch.testing.assert_close(module.hnorm.weight, torch.full((64,), size))


def test_each_module_has_pages_of_its_own(tiny_target: Target) -> None:
    """Module k of several writes layer L + k of the pool; a shared one writes layer L at every step."""
    three = MTPConfig(depth=3).build(tiny_target)
    places = [m.layer.self_attn.layer_idx for m in three.steps]  # pyright: ignore
    assert places == [4, 5, 6] and three.num_kv_layers == 3
    assert three.max_draft_tokens == 3 and not three.shares_prefix
    one = MTPConfig().build(tiny_target)
    assert one.num_kv_layers == 1 and one.max_draft_tokens is None and one.shares_prefix


def test_a_reduced_vocabulary_scores_its_rows(tiny_target: Target) -> None:
    """The head reads the rows of lm_head of the kept ids, in their order."""
    draft = MTPConfig(draft_vocab=(3, 5, 400)).build(tiny_target)
    assert torch.equal(draft.head_rows(), tiny_target.head_weight[[3, 5, 400]])
    whole = MTPConfig().build(tiny_target)
    assert whole.vocab is None and whole.head_rows() is tiny_target.head_weight


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"norms": "some"}, "draft.norms=some is unknown; use restored or none"),
        ({"depth": 0}, "draft.depth=0 is too small"),
    ],
)
def test_choices_that_are_not_are_refused(choice: dict[str, object], message: str) -> None:
    """A mistyped choice is one line that names it and what may be chosen."""
    with pytest.raises(UserError, match=message):
        MTPConfig(**choice)  # pyright: ignore
