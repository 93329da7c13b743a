"""Drafts that are trained in part or not at all, through the commands: what is not needed is not done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mtptrain.cli import main
from mtptrain.validate.compare import load_comparison
from mtptrain.validate.report import Report, load_report

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
    "validate.max_new_tokens=24",
    "validate.sampled_prompts=2",
    "runtime.kv_tokens=16384",
]
Run = Callable[..., Report]


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in a folder of its own and reads the report."""
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))

    def command(verb: str, *words: str) -> Report:
        where = [f"target.path={tiny_folder}", f"run_dir={tmp_path / 'run'}"]
        assert main([verb, *WORDS, *where, *words]) == 0
        return load_report(tmp_path / "run" / "report.json")

    return command


@pytest.mark.parametrize("verb", ["fit", "validate"])
@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_a_lookup_is_only_validated(run: Run, tmp_path: Path, verb: str, kind: str) -> None:
    """No answer is written, no feature captured, no head trained; the report names the lookup, lossless, with both
    lookups' figures beside it; run again, nothing is done again."""
    report = run(verb, f"draft={kind}")
    assert report.draft == kind and report.counts.prompts == 5
    assert report.lossless is not None and report.lossless.mismatches == 0
    assert report.baselines.ngram is not None and report.baselines.suffix is not None
    assert set(report.provenance.times) == {"validate"} and not report.warnings
    assert not (tmp_path / "cache" / "answers").exists()
    assert {p.name for p in (tmp_path / "run").iterdir() if p.is_dir()} == {"validate"}
    when = (tmp_path / "run" / "report.json").stat().st_mtime_ns
    run(verb, f"draft={kind}")
    assert (tmp_path / "run" / "report.json").stat().st_mtime_ns == when
    assert run(verb, f"draft={kind}", "num_draft_tokens=2").sampling.num_draft_tokens == 2


def test_a_lookup_cannot_be_trained(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says what to do instead."""
    words = [f"target.path={tiny_folder}", f"run_dir={tmp_path}", "draft=ngram"]
    assert main(["train", *WORDS, *words]) == 2
    assert "draft=ngram has nothing to train; run validate" in capsys.readouterr().err


def test_a_hybrid_is_its_trained_head_and_a_lookup(run: Run, tmp_path: Path) -> None:
    """A hybrid of a head that lies there trains nothing, whatever its lookup, threshold and draft length; its
    report names both; the head and its card stay as they were, and the head can be validated again."""
    head = run("fit", "draft=mtp", "draft.draft_vocab_size=0")
    assert head.draft == "mtp"
    folder = tmp_path / "run"
    kept = [*folder.glob("train/**/*"), *folder.glob("draft/*")]
    before = {path: path.stat().st_mtime_ns for path in kept if path.is_file()}
    for words in (
        ["draft.threshold=0.5"],
        ["draft.threshold=0.5", "num_draft_tokens=6"],
        ["draft@draft.lookup=ngram"],
    ):
        report = run("validate", "draft=hybrid", "draft.head.draft_vocab_size=0", *words)
        lookup = "ngram" if "draft@draft.lookup=ngram" in words else "suffix"
        assert report.draft == f"hybrid of {lookup} and mtp"
        assert report.lossless is not None and report.lossless.mismatches == 0
        assert report.simulated_acceptance_length is None
        assert {"prepare", "capture", "train", "validate"} <= set(report.provenance.times)
        assert {path: path.stat().st_mtime_ns for path in before} == before
    again = run("validate", "draft=mtp", "draft.draft_vocab_size=0")
    assert again.accepted_histogram == head.accepted_histogram
    assert (folder / "train" / "stage.json").stat().st_mtime_ns == before[
        folder / "train" / "stage.json"
    ]


def test_a_hybrid_without_a_head_trains_it(run: Run, tmp_path: Path) -> None:
    """`fit` goes all the way, and what it trains is what draft=mtp would be."""
    report = run("fit", "draft=hybrid", "draft.head.draft_vocab_size=0")
    assert report.draft == "hybrid of suffix and mtp"
    when = (tmp_path / "run" / "train" / "stage.json").stat().st_mtime_ns
    assert run("validate", "draft=mtp", "draft.draft_vocab_size=0").draft == "mtp"
    assert (tmp_path / "run" / "train" / "stage.json").stat().st_mtime_ns == when


def test_a_comparison_trains_a_head_once(tiny_folder: Path, tmp_path: Path) -> None:
    """A hybrid takes the head of the run that trains it alone, also where it comes first, and has its training
    figures; a lookup has none, no parameters and no cache."""
    own = '+compare.own.hybrid=["draft.head.draft_vocab_size=0"]'
    words = ["drafts=[hybrid,mtp,ngram]", "draft.draft_vocab_size=0", "compare.steps=4", own]
    words += ["compare.batch_sizes=[2]", "compare.speed_prompts=2"]
    where = [f"target.path={tiny_folder}", f"run_dir={tmp_path / 'run'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
        assert main(["compare", *WORDS, *where, *words]) == 0
    folder = tmp_path / "run"
    assert [p.parent.name for p in folder.glob("compare/*/train")] == ["mtp"]
    hybrid, mtp, ngram = load_comparison(folder / "compare.json").drafts
    assert hybrid.draft == "hybrid of suffix and mtp" and ngram.training is None
    assert hybrid.training == mtp.training and hybrid.cost.parameters == mtp.cost.parameters > 0
    assert ngram.cost.parameters == ngram.cost.cache_bytes_per_token == 0
    assert all(d.lossless is not None and d.lossless.mismatches == 0 for d in (hybrid, mtp, ngram))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["draft=ngram", "tree.kind=dynamic"], "proposes chains; use tree.kind=null"),
        (["draft=mtp", "tree.kind=best_first"], "use tree.kind=static or dynamic or null"),
        (["draft=mtp", "tree.drawn=true"], "tree.drawn=true needs tree.kind=static"),
        (["validate.typical_threshold=2"], "validate.typical_threshold=2 must lie in 0 to 1"),
    ],
)
def test_what_does_not_fit_is_said_at_once(
    words: list[str],
    line: str,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything runs, in one line."""
    where = [f"target.path={tiny_folder}", f"run_dir={tmp_path}"]
    assert main(["fit", *WORDS, *where, *words]) == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "validate").exists()
