"""A draft model: a whole language model that proposes, over keys and values of its own in the shared pages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.cli import main
from mtptrain.drafts.base import Draft, Drawn, TrueRows
from mtptrain.drafts.draft_model import DraftModelConfig
from mtptrain.drafts.folder import contract, load_draft, save_draft
from mtptrain.drafts.hybrid import HybridConfig
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.losses.kl import KL
from mtptrain.losses.smooth_l1 import SmoothL1
from mtptrain.losses.weighted_sum import WeightedSum
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target
from mtptrain.train.fit import require_all_trained
from mtptrain.train.module import TrainSettings
from mtptrain.types import Completion, Request, SamplingParams, UserError
from mtptrain.validate.acceptance import measure_acceptance
from mtptrain.validate.report import load_report

LONG = SamplingParams(max_new_tokens=24)
TIGHT = EngineLimits(
    max_batch=3, max_prefill_tokens=7, page_size=4, num_pages=75, num_draft_tokens=3
)
LIMITS = [EngineLimits(1, num_draft_tokens=3), EngineLimits(num_draft_tokens=3), TIGHT]


def _config(**changes: object) -> LlamaConfig:
    """Of another depth, width and shape of keys than the tiny target."""
    shape: dict[str, object] = {
        "vocab_size": 512,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**(shape | changes))


def _saved(config: LlamaConfig, like: Path, folder: Path) -> Path:
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in like.glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def small(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the target's tokenizer and weights that never learnt anything."""
    return _saved(_config(), tiny_folder, tmp_path_factory.mktemp("small"))


def _as_it_is(path: object) -> DraftModelConfig:
    return DraftModelConfig(path=str(path), distill=False)


def _generate(
    target: Target,
    backend: AttentionBackend,
    requests: list[Request],
    folder: Path | None,
    limits: EngineLimits,
    params: SamplingParams = LONG,
) -> list[Completion]:
    draft = _as_it_is(folder).build(target) if folder else None
    return Engine(target, backend, limits, frozenset(), draft).generate(requests, params)


# ---- what it proposes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", LIMITS, ids=["alone", "together", "tight"])
def test_the_target_itself_is_never_refused(
    tiny_target: Target,
    backend: AttentionBackend,
    requests: list[Request],
    tiny_folder: Path,
    limits: EngineLimits,
) -> None:
    """As its own draft it accepts every token greedily, whatever is batched, chunked or shared; so what it writes
    at serving, over pages, is what the network says."""
    params = SamplingParams(max_new_tokens=1 + 6 * 4)  # whole passes
    done = _generate(tiny_target, backend, requests[:8], tiny_folder, limits, params)
    passes = [p for c in done for p in c.passes]
    assert len(passes) == 8 * 6 and all(p.accepted == p.proposed == 3 for p in passes)
    assert measure_acceptance(done, 3).acceptance_length.value == 4


@pytest.mark.parametrize("limits", LIMITS, ids=["alone", "together", "tight"])
def test_greedy_answers_are_the_targets_own(
    tiny_target: Target,
    backend: AttentionBackend,
    requests: list[Request],
    small: Path,
    limits: EngineLimits,
) -> None:
    """However bad the model, in whatever batches: not a token differs, and no pass depends on its neighbours."""
    plain = _generate(tiny_target, backend, requests[:8], None, EngineLimits())
    done = _generate(tiny_target, backend, requests[:8], small, limits)
    alone = _generate(tiny_target, backend, requests[:8], small, LIMITS[0])
    assert [c.output_ids for c in done] == [c.output_ids for c in plain]
    assert [c.passes for c in done] == [c.passes for c in alone]


def test_each_token_is_drawn_from_the_models_own_law(
    tiny_target: Target, backend: AttentionBackend, requests: list[Request], small: Path
) -> None:
    """At every step of every proposal the logits are those of transformers alone behind the tokens so far, drafted
    ones included, after passes that kept few of them."""
    plain = LlamaForCausalLM.from_pretrained(small, attn_implementation="eager").eval()
    draft = _as_it_is(small).build(tiny_target)
    propose, checked = draft.propose, list[int]()

    def spy(rows: TrueRows, num_draft_tokens: int, draw: Callable[..., Drawn]) -> object:
        texts = [list(x) for x in rows.token_ids]

        def look(logits: Tensor) -> Drawn:
            for text, mine in zip(texts, logits, strict=True):
                with torch.no_grad():
                    expected = plain(input_ids=torch.tensor([text])).logits[0, -1]
                torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
                checked.append(len(text))
            drawn = draw(logits)
            for text, token in zip(texts, drawn.token.tolist(), strict=True):
                text.append(token)
            return drawn

        return propose(rows, num_draft_tokens, look)  # pyright: ignore

    draft.propose = spy  # pyright: ignore
    engine = Engine(tiny_target, backend, TIGHT, frozenset(), draft)
    done = engine.generate(requests[:4], SamplingParams(1.0, max_new_tokens=9))
    assert len(checked) == 3 * sum(c.decode_steps for c in done) > 40


def test_sampled_answers_have_the_targets_law(backend: AttentionBackend, tmp_path: Path) -> None:
    """Of 3,000 pairs of tokens at T=1 each is as frequent as the target alone makes it."""
    torch.manual_seed(0)
    shape = {"vocab_size": 5, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}
    target = Target(LlamaForCausalLM(_config(**shape, initializer_range=0.6)))
    LlamaForCausalLM(_config(**shape, initializer_range=0.6)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")  # never read: the target has none to compare
    asked = [Request(str(i), "all", (1, 2, 3)) for i in range(3000)]
    params = SamplingParams(1.0, max_new_tokens=3, seed=5)
    limits = EngineLimits(512, num_draft_tokens=2)
    done = _generate(target, backend, asked, tmp_path, limits, params)
    accepted = [p.accepted for c in done for p in c.passes]
    assert 0.2 < sum(accepted) / len(accepted) < 1.8
    counts = torch.zeros(5, 5, 5)
    for c in done:
        counts[c.output_ids] += 1
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    texts = torch.cat([torch.tensor([[1, 2, 3]]).expand(25, -1), pairs], 1)
    other = LlamaForCausalLM(target.config).eval()  # transformers' own attention
    other.load_state_dict(target.model.state_dict())
    other.config._attn_implementation = "eager"
    with torch.no_grad():
        p = other(input_ids=texts).logits.softmax(-1)
    law = p[:, 2].gather(1, pairs[:, :1]) * p[:, 3].gather(1, pairs[:, 1:]) * p[:, 4]
    expected = 3000 * law.view(5, 5, 5)
    assert abs(float(law.sum()) - 1) < 1e-4
    for axis in (0, 2):
        a, b = counts.sum(axis), expected.sum(axis)
        assert float(((a - b).square() / b).sum()) < 60  # 24 degrees of freedom: one in 15,000


# ---- what it is ------------------------------------------------------------------------------------------


def test_its_layers_have_pages_of_their_own_shape(
    tiny_target: Target, backend: AttentionBackend, small: Path
) -> None:
    """Behind the target's layers, in the same pool; as it is, nothing of it is trained."""
    draft = _as_it_is(small).build(tiny_target)
    engine = Engine(tiny_target, backend, EngineLimits(num_draft_tokens=2), frozenset(), draft)
    shapes = [(x.shape[1], x.shape[3]) for x in engine.runner.pool.keys]
    assert shapes == [(2, 16)] * 4 + [(1, 8)] * 2
    assert [x.self_attn.layer_idx for x in draft.decoder.layers] == [4, 5]
    assert not any(p.requires_grad for p in draft.parameters()) and draft.config.trained() is None


def test_a_model_that_is_whole_is_validated_and_again_where_its_weights_change(
    tiny_folder: Path,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the command: lossless, with no training; and a report is made anew for other weights there."""
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(small, tmp_path / "model")
    words = [
        "draft=draft_model",
        "draft.distill=false",
        f"draft.path={folder}",
        f"target.path={tiny_folder}",
    ]
    words += ["data.eval_limit=4", "validate.max_new_tokens=16", "runtime.kv_tokens=16384"]
    words += [f"run_dir={tmp_path / 'run'}", "validate.sampled_prompts=2"]

    def acceptance() -> float:
        assert main(["validate", *words]) == 0
        report = load_report(tmp_path / "run" / "report.json")
        assert report.draft == "draft_model"
        assert report.lossless is not None and report.lossless.mismatches == 0
        return report.acceptance_length.value or 0.0

    assert acceptance() < 2
    shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
    assert acceptance() > 4


@pytest.mark.parametrize("size", [300, 500, 520])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("distill", [True, False])
def test_its_vocabulary_may_be_longer_or_shorter(
    tiny_target: Target,
    tiny_folder: Path,
    backend: AttentionBackend,
    requests: list[Request],
    tmp_path: Path,
    size: int,
    tied: bool,
    distill: bool,
) -> None:
    """As where one embedding is padded further: it says what both have, reads what it has no row for as something
    else, and neither changes what the target writes. A folder of it gives back the same."""
    shape = _config(vocab_size=size, tie_word_embeddings=tied)
    folder = _saved(shape, tiny_folder, tmp_path / "other")
    config = DraftModelConfig(path=str(folder), distill=distill)
    draft = config.build(tiny_target)
    assert len(draft.head_rows()) == len(draft.frozen_rows()) == min(size, 512)
    save_draft(draft, tmp_path / "draft", contract(draft, tiny_target, "f", "t", "k", "strip"))
    again = load_draft(tmp_path / "draft", tiny_target)
    assert again.config == draft.config and torch.equal(again.head_rows(), draft.head_rows())
    plain = _generate(tiny_target, backend, requests[:4], None, EngineLimits())
    assert max(max(c.request.prompt_ids + c.output_ids) for c in plain) > 300
    engine = Engine(tiny_target, backend, LIMITS[1], frozenset(), config.around(again, tiny_target))
    done = engine.generate(requests[:4], LONG)
    assert [c.output_ids for c in done] == [c.output_ids for c in plain]
    assert all(c.passes for c in done)


# ---- what it learns --------------------------------------------------------------------------------------


def test_a_small_model_learns_the_targets_answers(
    tiny_target: Target,
    backend: AttentionBackend,
    requests: list[Request],
    small: Path,
    fit_head: Callable[..., Draft],
) -> None:
    """A model of another width that knew nothing drafts most tokens once it has been trained on the answers, by the
    target's laws; one drafted step has taught them all. What serves then is the same, laid out for inference."""
    before = _generate(tiny_target, backend, requests[:8], small, LIMITS[1])
    config = DraftModelConfig(path=str(small))
    how = {"epochs": 40, "unroll_steps": 1, "learning_rate": 4e-3}
    trained = fit_head(config, **how)
    done = {}
    for name, draft in ("plain", trained), ("laid out", config.around(trained, tiny_target)):
        engine = Engine(tiny_target, backend, LIMITS[1], frozenset(), draft)
        done[name] = engine.generate(requests[:8], LONG)
    assert [c.passes for c in done["plain"]] == [c.passes for c in done["laid out"]]
    length = measure_acceptance(done["plain"], 3).acceptance_length.value
    assert (measure_acceptance(before, 3).acceptance_length.value or 9) < 1.3
    assert length is not None and length > 2


def test_it_is_fitted_saved_and_served(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command: what serves is what was trained, without a loss; the folder holds all of the model, tied
    weights once, and no pickle; its checkpoint gives the same again; another start is another training."""
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    shape, run = _config(tie_word_embeddings=True), tmp_path / "run"
    folder = _saved(shape, tiny_folder, tmp_path / "model")
    words = ["draft=draft_model", f"draft.path={folder}", f"target.path={tiny_folder}"]
    words += ["data.limit=24", "data.eval_limit=4", "data.max_turns=1", "prepare.max_new_tokens=16"]
    words += ["validate.max_new_tokens=16", "validate.sampled_prompts=2", f"run_dir={run}"]
    words += ["train.max_steps=60", "train.unroll_steps=1", "train.held_out=2"]
    words += ["runtime.kv_tokens=16384"]
    assert main(["fit", *words]) == 0
    report = load_report(run / "report.json")
    assert report.lossless is not None and report.lossless.mismatches == 0
    assert report.draft == "draft_model" and not report.warnings
    assert report.simulated_acceptance_length is not None
    assert sum(1 for _ in run.rglob("*.pt")) == 0
    held = load_file(run / "draft" / "model.safetensors")
    start = load_file(folder / "model.safetensors")
    assert {x.numel() for x in held.values()} == {x.numel() for x in start.values()}
    assert "shares no weights" in (run / "draft" / "README.md").read_text()
    weights = (run / "draft" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "draft")
    assert main(["train", *words]) == 0
    assert (run / "draft" / "model.safetensors").read_bytes() == weights
    LlamaForCausalLM(shape).save_pretrained(folder)
    assert main(["train", *words]) == 0
    assert (run / "draft" / "model.safetensors").read_bytes() != weights


def test_a_loss_over_features_is_refused(
    tiny_target: Target, settings: TrainSettings, small: Path
) -> None:
    """Before anything is trained: its states are of no layer of the target."""
    draft = DraftModelConfig(path=str(small)).build(tiny_target)
    mixed = WeightedSum({"a": KL(), "b": SmoothL1()}, {"a": 1.0, "b": 1.0})
    for loss in (SmoothL1(), mixed):
        with pytest.raises(UserError, match=f"loss={type(loss).__name__} compares features"):
            require_all_trained(draft, loss, settings)
    require_all_trained(draft, KL(), settings)


# ---- what is refused -------------------------------------------------------------------------------------


def _refused(message: str, path: object, target: Target) -> None:
    with pytest.raises(UserError, match=message) as caught:
        _as_it_is(path).build(target)
    assert "\n" not in str(caught.value) and "target.path" not in str(caught.value)


def test_what_is_no_model_is_refused(tiny_target: Target, small: Path, tmp_path: Path) -> None:
    """One line each: nothing named, nothing there, no causal model, weights missing, no tokenizer."""
    _refused("^draft=draft_model needs draft.path=", "", tiny_target)
    config = DraftModelConfig(num_layers=5)
    with pytest.raises(UserError, match="draft.num_layers=5 must lie in 1 to 4"):
        config.build(tiny_target)
    _refused("^draft.path=/no/such/folder: no such folder", "/no/such/folder", tiny_target)
    folder = shutil.copytree(small, tmp_path / "encoder")
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    _refused("^draft.path=.* cannot be loaded", folder, tiny_target)
    folder = shutil.copytree(small, tmp_path / "deeper")
    _config(num_hidden_layers=3).save_pretrained(folder)
    _refused("^draft.path=.* lacks 9 weights of its model", folder, tiny_target)
    folder = shutil.copytree(small, tmp_path / "bare")
    for path in folder.glob("*token*"):
        path.unlink()
    _refused("^draft.path=.*: no tokenizer ", folder, tiny_target)


def test_a_model_of_other_tokens_is_refused(
    tiny_target: Target, small: Path, tmp_path: Path
) -> None:
    """One line names a number and what it is to both."""
    folder = shutil.copytree(small, tmp_path / "swapped")
    held = json.loads((folder / "tokenizer.json").read_text())
    vocab = held["model"]["vocab"]
    first = min(vocab["a"], vocab["b"])
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(held))
    _refused(f"token {first} is '.' there and '.' here; use", folder, tiny_target)


def test_a_hybrid_takes_it_for_no_lookup(small: Path) -> None:
    """It has weights."""
    with pytest.raises(UserError, match="draft.lookup must be a draft without weights"):
        HybridConfig(_as_it_is(small), MTPConfig())
