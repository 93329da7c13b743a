"""A draft folder that someone has made to be loaded by us: UserError in one line, and nothing of it is run.

Configs, contracts and weight headers are mutated at random (hypothesis), 750 cases; the memory and import
lies are written out. Only the folder is read: no forward pass.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM

from mtptrain.drafts.base import Draft
from mtptrain.drafts.folder import contract, load_contract, load_draft, save_draft
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.targets.base import Target
from mtptrain.types import UserError

MANY = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 99),
    st.sampled_from(
        [10**9, 10**30, 0.5, float("nan"), "a\nb", "layer.0", "layer.²", "../x", "\x00"]
    ),
    st.text(max_size=6),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
mechanisms = st.one_of(
    st.sampled_from(
        [
            "os.system",
            "mtptrain.drafts.folder.Path",
            "mtptrain.drafts.base.joined_layer.JoinedLayer",
            "mtptrain.drafts.mtp.JoinedLayer",
            "mtptrain.drafts.base.HeadConfig",
            "mtptrain.drafts.base.continuation.AutoregressiveConfig",
            "mtptrain.drafts.mtp.AutoregressiveConfig",
            "mtptrain.drafts.ngram.NgramConfig",
            "mtptrain.drafts.nosuch.Config",
            "mtptrain.drafts...os.system",
            "mtptrain.drafts.mtp.\x00",
            "mtptrain.drafts.mtp.MTPConfig\n",
        ]
    ),
    st.text(max_size=8).map("mtptrain.drafts.".__add__),
)


@pytest.fixture(scope="module")
def target() -> Target:
    """The smallest there is: what is loaded here never runs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return Target(LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def sound(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a sound draft folder."""
    folder = tmp_path_factory.mktemp("sound")
    draft = MTPConfig(draft_vocab=(2, 3, 9)).build(target)
    save_draft(draft, folder, contract(draft, target, "f", "t", "k", "strip"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def _folder(files: dict[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        yield Path(name)


def _load(files: dict[str, bytes], target: Target) -> Draft | None:
    """The draft, or None where it is refused, which must be one line."""
    with _folder(files) as folder:
        try:
            return load_draft(folder, target)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 4000
            return None


def _with(files: dict[str, bytes], name: str, **changes: Any) -> dict[str, bytes]:
    return files | {name: json.dumps(json.loads(files[name]) | changes).encode()}


def test_the_sound_folder_loads(sound: dict[str, bytes], target: Target) -> None:
    """What is mutated below is a draft, so a refusal is the mutation's."""
    assert _load(sound, target) is not None


@settings(max_examples=300, **MANY)
@given(data=st.data())
def test_a_mutated_config_is_refused_in_one_line_or_builds_that_head(
    data: st.DataObject, sound: dict[str, bytes], target: Target
) -> None:
    """Any value under any key: UserError, or a head of the shape that the weights have."""
    keys = [*json.loads(sound["config.json"]), "draft_vocab", "other"]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3))
    draft = _load(_with(sound, "config.json", **changes), target)
    assert draft is None or draft.config.depth == 1


@settings(max_examples=100, **MANY)
@given(name=mechanisms)
def test_a_folder_names_only_heads_of_mtptrain(
    name: str, sound: dict[str, bytes], target: Target
) -> None:
    """Nothing is imported outside mtptrain.drafts, and nothing in it is called but a head's config."""
    before = set(sys.modules)
    assert _load(_with(sound, "config.json", _target_=name), target) is None
    assert all(module.startswith("mtptrain.drafts.") for module in set(sys.modules) - before)


@settings(max_examples=150, **MANY)
@given(data=st.data())
def test_a_mutated_contract_is_refused_in_one_line_or_read(
    data: st.DataObject, sound: dict[str, bytes]
) -> None:
    """Any value under any key: UserError, or a contract whose fields are of their kinds."""
    keys = [*json.loads(sound["contract.json"]), "other"]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3))
    with _folder(_with(sound, "contract.json", **changes)) as folder:
        try:
            promise = load_contract(folder)
        except UserError as error:
            assert "\n" not in str(error)
            return
    assert isinstance(promise.target_id, str) and isinstance(promise.taps, tuple)


@settings(max_examples=200, **MANY)
@given(data=st.data())
def test_mutated_weights_are_refused_in_one_line_or_load(
    data: st.DataObject, sound: dict[str, bytes], target: Target
) -> None:
    """Bytes changed anywhere in the file, most of them in its header: UserError, or finite weights."""
    content = bytearray(sound["model.safetensors"])
    header = 8 + struct.unpack("<Q", content[:8])[0]
    ends = st.sampled_from([8, header, len(content)])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(ends.flatmap(lambda end: st.integers(0, end - 1)))
        content[place] = data.draw(st.integers(0, 255))
    draft = _load(sound | {"model.safetensors": bytes(content)}, target)
    if draft is not None:
        assert all(bool(torch.isfinite(x).all()) for x in draft.state_dict().values())


@pytest.mark.parametrize("file", ["config.json", "contract.json"])
@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 10**5, "9" * 10**4, "\x00", "{"])
def test_json_of_another_form_is_one_line(
    file: str, text: str, sound: dict[str, bytes], target: Target
) -> None:
    """Not JSON, no object, or nested a hundred thousand deep."""
    with _folder(sound | {file: text.encode()}) as folder, pytest.raises(UserError) as caught:
        load_draft(folder, target) if file == "config.json" else load_contract(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "vocabulary",
    [
        torch.tensor(3),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(3),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([-1, 0, 0]),
        torch.tensor([0, 0, 14]),
        torch.tensor([2, 0, 0]),
        torch.zeros(17, dtype=torch.int64),
        torch.empty(2**40, 0, dtype=torch.int64),
    ],
)
def test_a_vocabulary_that_names_no_tokens_is_refused(
    vocabulary: torch.Tensor, sound: dict[str, bytes], target: Target
) -> None:
    """Another shape or kind, a token that the target has not, one named twice, an order that is none."""
    with _folder(sound) as folder:
        whole = load_draft(folder, target).state_dict()
        (folder / "model.safetensors").write_bytes(save(whole | {"d2t": vocabulary}))
        with pytest.raises(UserError, match="d2t names no tokens"):
            load_draft(folder, target)


@pytest.mark.parametrize(
    "changes", [{"depth": 10**9}, {"taps": ["final"] * 10**5}, {"init_layer": 7}]
)
def test_a_config_that_would_take_memory_is_refused_before_it_does(
    changes: dict[str, Any], sound: dict[str, bytes], target: Target
) -> None:
    """A billion modules, a hundred thousand taps, a layer that is not there."""
    assert _load(_with(sound, "config.json", **changes), target) is None


def test_a_weight_that_is_not_finite_is_refused(sound: dict[str, bytes], target: Target) -> None:
    """A nan trained on, or a flipped exponent bit, is named and not served."""
    with _folder(sound) as folder:
        whole = load_draft(folder, target).state_dict()
        name = sorted(whole)[0]
        whole[name].view(-1)[0] = float("nan")
        (folder / "model.safetensors").write_bytes(save(whole))
        with pytest.raises(UserError, match=f"{name}.* is not finite"):
            load_draft(folder, target)


def test_no_pickle_is_read(sound: dict[str, bytes], target: Target) -> None:
    """Weights under torch's own name are not looked for: without safetensors there is no draft."""
    files = dict(sound)
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    assert _load(files, target) is None
