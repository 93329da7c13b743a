"""A target read through taps, with its embedding, final norm and lm_head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext
from mtptrain.targets import base
from mtptrain.targets.base import Target, layer_count, max_positions, place_taps, tap_layer
from mtptrain.targets.fingerprint import target_fingerprint
from mtptrain.types import UserError

IDS = torch.tensor([0, 84, 90, 310, 70, 78, 200, 58, 273])
PLACES = torch.arange(len(IDS))


def _run(target: Target, backend: AttentionBackend, *taps: str) -> base.TargetOutput:
    return target.forward(IDS, PLACES, ForwardContext.packed(backend, [len(IDS)]), taps)


def test_taps_are_where_transformers_says(
    tiny_target: Target, plain_model: LlamaForCausalLM, backend: AttentionBackend
) -> None:
    """`layer.k` is the output of decoder layer k, 0-based; `final_prenorm` the input of the final norm, `final`
    its output; they stand side by side in the asked order."""
    with torch.no_grad():
        states = plain_model(input_ids=IDS[None], output_hidden_states=True).hidden_states
    out = _run(tiny_target, backend, "layer.2", "final", "layer.0", "final_prenorm", "layer.3")
    second, final, zeroth, prenorm, third = out.features.split(64, -1)
    for got, want in ((second, states[3]), (zeroth, states[1]), (final, states[4])):
        torch.testing.assert_close(got, want[0], atol=2e-5, rtol=1e-5)
    assert torch.equal(prenorm, third) and torch.equal(final, out.final)
    torch.testing.assert_close(tiny_target.decoder.norm(prenorm), final, atol=2e-5, rtol=1e-5)


def test_no_tap_is_no_column(tiny_target: Target, backend: AttentionBackend) -> None:
    """A draft that reads no features gets rows of width zero; hooks do not outlive their forward."""
    assert _run(tiny_target, backend).features.shape == (len(IDS), 0)
    _run(tiny_target, backend, "layer.1")
    assert not any(layer._forward_hooks for layer in tiny_target.decoder.layers)


def test_logits_are_those_of_transformers(
    tiny_target: Target, plain_model: LlamaForCausalLM, backend: AttentionBackend
) -> None:
    """The frozen head on the `final` tap is the whole model."""
    with torch.no_grad():
        want = plain_model(input_ids=IDS[None]).logits[0]
    got = tiny_target.logits(_run(tiny_target, backend).final)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_the_best_token_in_blocks_is_that_of_all_logits(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the block, ties across blocks included, the lowest best id wins."""
    states = torch.randn(40, 64)
    states[0] = 0  # all logits equal
    want = tiny_target.logits(states).argmax(-1)
    for block in (7, 100, 512, 8192):
        monkeypatch.setattr(base, "VOCABULARY_BLOCK", block)
        assert torch.equal(tiny_target.greedy(states), want) and int(want[0]) == 0


@pytest.mark.parametrize("tap", ["layer.4", "layer.-1", "layer", "layer.x", "embedding", "final.1"])
def test_a_tap_that_does_not_exist_is_the_users_error(
    tap: str, tiny_target: Target, backend: AttentionBackend
) -> None:
    """The message names what there is."""
    with pytest.raises(
        UserError, match="does not exist in a target of 4 layers.*layer.0 to layer.3"
    ):
        _run(tiny_target, backend, tap)


def test_tap_names() -> None:
    """`layer.k` has an index, the others have none."""
    assert [tap_layer(t) for t in ("layer.0", "layer.17", "final", "final_prenorm")] == [
        0,
        17,
        None,
        None,
    ]


def test_a_target_is_frozen(tiny_target: Target) -> None:
    """No parameter of it can be trained, and shapes are read off its config."""
    assert not any(p.requires_grad for p in tiny_target.model.parameters())
    assert (tiny_target.hidden_size, tiny_target.num_layers, tiny_target.vocab_size) == (64, 4, 512)
    assert tiny_target.kv_shape() == (2, 16)


@pytest.mark.parametrize(
    ("tap", "of", "placed"),
    [
        ("layer.80%", 30, "layer.23"),
        ("layer.80%", 4, "layer.2"),
        ("layer.1%", 4, "layer.0"),
        ("layer.100%", 4, "layer.3"),
        ("layer.2", 4, "layer.2"),
        ("final", 4, "final"),
    ],
)
def test_a_share_of_the_layers_gets_its_number(tap: str, of: int, placed: str) -> None:
    """One recipe fits targets of any depth; names that are numbers already stay."""
    assert place_taps([tap], of) == (placed,)


@pytest.mark.parametrize("tap", ["layer.0%", "layer.101%", "layer.x%", "layer.%"])
def test_an_impossible_share_is_the_users_error(tap: str) -> None:
    """The message names the tap and what would do."""
    with pytest.raises(UserError, match=f"tap '{tap}' is no share of the layers"):
        place_taps([tap], 4)


def test_layers_are_counted_without_loading(tiny_folder: Path, tmp_path: Path) -> None:
    """The config tells; a folder without one is the same error as when it is loaded."""
    assert layer_count(tiny_folder) == 4
    with pytest.raises(UserError, match=f"target.path={tmp_path} cannot be loaded"):
        layer_count(tmp_path)


def test_positions_are_read_without_loading(tiny_folder: Path, tmp_path: Path) -> None:
    """The config tells; one that does not say sets no limit."""
    config = json.loads((tiny_folder / "config.json").read_text())
    assert max_positions(tiny_folder) == config["max_position_embeddings"]
    silent = {"model_type": "mamba", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(silent))
    assert max_positions(tmp_path) is None


def test_a_folder_without_a_model_is_the_users_error(tmp_path: Path) -> None:
    """An empty folder, or one with a broken config, is named with the key to set."""
    with pytest.raises(UserError, match=f"target.path={tmp_path} cannot be loaded"):
        Target.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(UserError, match=f"target.path={tmp_path} cannot be loaded") as caught:
        Target.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_truncated_weights_are_the_users_error(tiny_folder: Path, tmp_path: Path) -> None:
    """A download that was cut short is one line, not a trace."""
    for path in tiny_folder.iterdir():
        content = path.read_bytes()
        (tmp_path / path.name).write_bytes(
            content[:-9] if path.suffix == ".safetensors" else content
        )
    with pytest.raises(UserError, match="cannot be loaded"):
        Target.load(tmp_path)


def test_a_weight_that_is_not_there_is_the_users_error(tiny_folder: Path, tmp_path: Path) -> None:
    """transformers would go on with random numbers in its place; the tied lm_head is not missing."""
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights .*layers.1.mlp.up_proj"):
        Target.load(tmp_path)


def test_the_fingerprint_covers_what_the_target_says(tiny_folder: Path, tmp_path: Path) -> None:
    """One changed weight or template changes it; other files do not, and neither does the folder's name."""
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = target_fingerprint(tmp_path)
    assert before == target_fingerprint(tiny_folder)
    (tmp_path / "README.md").write_text("hello")
    assert target_fingerprint(tmp_path) == before
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = target_fingerprint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert len({before, changed, target_fingerprint(tmp_path)}) == 3
