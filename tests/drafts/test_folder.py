"""A draft on disk: what the folder promises, and what is said of one that does not keep it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from mtptrain.drafts.folder import contract, load_contract, load_draft, save_draft
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.targets.base import Target
from mtptrain.types import UserError


@pytest.fixture
def saved(tiny_target: Target, tmp_path: Path) -> Path:
    draft = MTPConfig(draft_vocab=(2, 3, 9, 500)).build(tiny_target)
    save_draft(draft, tmp_path / "draft", contract(draft, tiny_target, "f00d", "t", "k", "strip"))
    return tmp_path / "draft"


def test_the_vocabulary_is_kept_as_offsets(saved: Path, tiny_target: Target) -> None:
    """target id = draft id + d2t[draft id], as the field's engines read it; the config does not repeat it."""
    d2t = load_file(saved / "model.safetensors")["d2t"]
    assert (d2t + torch.arange(4)).tolist() == [2, 3, 9, 500]
    assert "draft_vocab" not in json.loads((saved / "config.json").read_text())
    assert load_draft(saved, tiny_target).config.draft_vocab == (2, 3, 9, 500)


def test_weights_are_written_in_fp32(saved: Path) -> None:
    """Masters are fp32 whatever the target's own dtype."""
    tensors = load_file(saved / "model.safetensors")
    assert {x.dtype for name, x in tensors.items() if name != "d2t"} == {torch.float32}


def test_the_contract_says_what_serving_must_keep(saved: Path, tiny_target: Target) -> None:
    """Taps and their norm, order, positions, vocabulary and what is shared are read back as they were."""
    promise = load_contract(saved)
    assert promise.target_fingerprint == "f00d" and promise.taps == ("final",)
    assert promise.feature_norm == "post" and promise.norm_kind == "LlamaRMSNorm"
    assert promise.concat_order == ("embedding", "feature")
    assert promise.draft_vocab_size == 4 and set(promise.shared) == {"embedding", "lm_head"}
    assert promise.norm_eps == tiny_target.norm_eps
    draft = MTPConfig(taps=("layer.1", "final")).build(tiny_target)
    assert contract(draft, tiny_target, "f", "t", "k", "strip").feature_norm == "mixed"


def test_the_contract_of_a_tiny_vocabulary() -> None:
    """A target of fewer tokens than the hashed sample has a contract too."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    target = Target(LlamaForCausalLM(config))
    assert contract(MTPConfig().build(target), target, "f", "t", "k", "strip").draft_vocab_size == 8


def test_a_folder_cut_short_is_not_a_draft(saved: Path, tiny_target: Target) -> None:
    """config.json is written last and removed first, so weights alone are never taken for a head."""
    (saved / "config.json").unlink()
    with pytest.raises(UserError, match="holds no whole draft"):
        load_draft(saved, tiny_target)


def _truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])


def _config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


BROKEN = {
    "weights cut short": _truncate,
    "config is no object": lambda folder: (folder / "config.json").write_text("[1]"),
    "config is no json": lambda folder: (folder / "config.json").write_text("{"),
    "weights missing": lambda folder: (folder / "model.safetensors").unlink(),
    "foreign code": _config(_target_="os.system"),
    "unknown mechanism": _config(_target_="mtptrain.drafts.nosuch.Config"),
    "unknown class": _config(_target_="mtptrain.drafts.mtp.Nothing"),
    "no config of a head": _config(_target_="mtptrain.drafts.mtp.JoinedLayer"),
    "unknown key": _config(width=3),
    "other shape": _config(depth=2),
    "refused choice": _config(depth=0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_line(name: str, saved: Path, tiny_target: Target) -> None:
    """Whatever is wrong with a folder, the error is the user's, in one line, and names the folder or key."""
    BROKEN[name](saved)
    with pytest.raises(UserError) as caught:
        load_draft(saved, tiny_target)
    assert "\n" not in str(caught.value)
    assert str(saved) in str(caught.value) or name == "refused choice"


def test_a_head_of_another_target_is_refused(saved: Path) -> None:
    """Shapes that do not fit name the folder and the target."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    with pytest.raises(UserError, match="does not fit target in-memory"):
        load_draft(saved, Target(LlamaForCausalLM(config)))
