"""What could not end well is refused before the target is asked for anything, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtptrain.cli import main
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.targets.base import Target
from mtptrain.validate.report import load_report

WORDS = [
    "data.limit=12",
    "data.eval_limit=5",
    "data.max_turns=1",
    "prepare.max_new_tokens=16",
    "train.epochs=1",
    "train.batch_tokens=256",
    "train.held_out=2",
    "train.curve_points=1",
    "train.scored_tokens=0",
    "validate.max_new_tokens=16",
    "validate.sampled_prompts=2",
    "runtime.kv_tokens=16384",
]
TAPS = "draft.taps=[layer.0,layer.1,layer.2]"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["draft=medusa", "draft.num_heads=3"], "num_draft_tokens=4 does not fit this draft; use 1 to 3"),
        (["draft=dflash", TAPS, "draft.block_size=4"], "num_draft_tokens=4 does not fit this draft"),
        (["draft=mtp", "draft.depth=3"], "num_draft_tokens=4 does not fit this draft; use 1 to 3"),
        (["draft=medusa"], "train.unroll_steps=3 leaves 1 of the draft's 4 steps untrained"),
        (["draft=peagle", TAPS, "train.unroll_steps=1"], "leaves a part of the draft untrained"),
        (["draft=dspark", TAPS, "train.unroll_steps=4"], "leaves the draft's confidence untrained"),
        (["draft=mtp", "min_confidence=0.5"], "min_confidence=0.5 needs a draft that says how sure"),
        (["draft=ngram", "min_confidence=0.5"], "min_confidence=0.5 needs a draft that says how sure"),
        (["draft=mtp", "draft.taps=[layer.9]"], "tap 'layer.9' does not exist"),
        (["draft=mtp", "draft.init_layer=9"], "draft.init_layer=9 must lie in 0 to 3"),
        (["tree.kind=dynamic", "validate.block_verify=true"], "block_verify=true is for chains; use tree"),
        (["draft=hybrid", "draft@draft.head=medusa"], "train.unroll_steps=3 leaves 1 of"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_a_run_that_cannot_end_is_refused_before_anything_is_computed(
    verb: str,
    words: list[str],
    line: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is written then: no answer, no feature, not even the recipe of the run."""
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    where = [f"target.path={tiny_folder}", f"run_dir={tmp_path / 'run'}"]
    assert main([verb, *WORDS, *where, *words]) == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "cache").exists() and not list((tmp_path / "run").iterdir())


def test_a_hybrid_may_draft_further_than_its_head(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lookup does; its head is trained, proven and served with what it can propose."""
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    where = [f"target.path={tiny_folder}", f"run_dir={tmp_path / 'run'}"]
    words = ["draft=hybrid", "draft@draft.head=medusa", "draft.head.num_heads=2"]
    assert main(["fit", *WORDS, *where, *words, "draft.head.draft_vocab_size=0"]) == 0
    report = load_report(tmp_path / "run" / "report.json")
    assert report.sampling.num_draft_tokens == 4
    assert report.lossless is not None and report.lossless.mismatches == 0


def test_an_outline_has_the_shapes_of_the_target(tiny_folder: Path, tiny_target: Target) -> None:
    """And no weight, of its own or of a head that is built on it."""
    outline, config = Target.outline(tiny_folder), MTPConfig(taps=("layer.2",))
    for real, shape in (
        (tiny_target.model, outline.model),
        (config.build(tiny_target), config.build(outline)),
    ):
        assert {n: p.shape for n, p in real.named_parameters()} == {
            n: p.shape for n, p in shape.named_parameters()
        }
    assert all(p.is_meta for p in outline.model.parameters())
