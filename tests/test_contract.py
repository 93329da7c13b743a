"""What is changed between stages is caught: the store and the head both refuse, and say both values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hidden_state_cache import FeatureStore, FeatureWriter, StoreError, StoreIdentity
from mtptrain.capture import ShardSink, identity
from mtptrain.chat import Chat
from mtptrain.drafts.folder import Contract, check_contract, contract, save_draft
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.prepare import completion_answer
from mtptrain.targets.base import Target
from mtptrain.targets.fingerprint import target_fingerprint
from mtptrain.template import Thinking
from mtptrain.types import Completion, UserError

TAPS = ("layer.1", "layer.2", "final_prenorm", "final")


@dataclass(frozen=True)
class Stage:
    """A target as one stage meets it."""

    folder: Path
    thinking: Thinking = "strip"
    taps: tuple[str, ...] = TAPS

    @property
    def target(self) -> Target:
        return Target.load(self.folder)

    @property
    def chat(self) -> Chat:
        return Chat.load(self.folder, self.thinking)

    def identity(self) -> StoreIdentity:
        return identity(self.target, self.chat, self.taps, target_fingerprint(self.folder), "d")

    def contract(self) -> Contract:
        chat, target = self.chat, self.target
        draft = MTPConfig(taps=self.taps[1:2]).build(target)
        hashes = (target_fingerprint(self.folder), chat.template_hash, chat.tokenizer_hash)
        return contract(draft, target, *hashes, chat.thinking)


@pytest.fixture
def stage(tiny_folder: Path, tmp_path: Path) -> Stage:
    return Stage(Path(shutil.copytree(tiny_folder, tmp_path / "target")))


@pytest.fixture
def store(stage: Stage, answers: list[Completion], tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    sink = ShardSink(FeatureWriter(folder, stage.identity(), "bf16"), stage.target, TAPS, True)
    sink.from_completions(0, answers[:4], [completion_answer(c, stage.chat) for c in answers[:4]])
    sink.writer.finish()
    return folder


@pytest.fixture
def head(stage: Stage, tmp_path: Path) -> Path:
    draft = MTPConfig(taps=stage.taps[1:2]).build(stage.target)
    save_draft(draft, tmp_path / "draft", stage.contract())
    return tmp_path / "draft"


def _template(stage: Stage) -> Stage:
    path = stage.folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("helpful", "brief"))
    return stage


def _config(stage: Stage, **changes: object) -> Stage:
    path = stage.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return stage


def _weight(stage: Stage) -> Stage:
    tensors = load_file(stage.folder / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(tensors, stage.folder / "model.safetensors", {"format": "pt"})
    return stage


ROPE = {"rope_type": "default", "rope_theta": 20_000.0}
CHANGES: dict[str, tuple[Callable[[Stage], Stage], str, str]] = {
    # what changed, and the field that the store and the head name it by
    "chat template": (_template, "template_hash", "template_hash"),
    "RoPE": (lambda s: _config(s, rope_parameters=ROPE), "target_fingerprint", "rope"),
    "thinking mode": (lambda s: Stage(s.folder, "off"), "thinking", "thinking"),
    "fine-tuned weight": (_weight, "target_fingerprint", "target_fingerprint"),
    "tap": (lambda s: Stage(s.folder, taps=("layer.2", "layer.1", *TAPS[2:])), "taps", "taps"),
    "norm": (lambda s: _config(s, rms_norm_eps=1e-3), "norm_eps", "norm_eps"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_store_of_before_the_change_is_refused(what: str, stage: Stage, store: Path) -> None:
    change, field, _ = CHANGES[what]
    FeatureStore.open(store, stage.identity())
    changed = change(stage)
    with pytest.raises(StoreError, match=rf"{field}.* in the store but .* was expected"):
        FeatureStore.open(store, changed.identity())


@pytest.mark.parametrize("what", CHANGES)
def test_a_head_of_before_the_change_is_refused(what: str, stage: Stage, head: Path) -> None:
    change, _, field = CHANGES[what]
    check_contract(head, stage.contract())
    changed = change(stage)
    with pytest.raises(UserError, match=rf"{field} is .* in its contract and .* here"):
        check_contract(head, changed.contract())


def test_a_target_that_has_only_moved_is_the_same(stage: Stage, head: Path, tmp_path: Path) -> None:
    moved = Stage(Path(shutil.copytree(stage.folder, tmp_path / "elsewhere")))
    check_contract(head, moved.contract())
