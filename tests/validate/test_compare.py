"""A comparison as values and files: what the runs have written, on one page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtptrain.run import Provenance, StageFolder
from mtptrain.types import Completion, Request, UserError, VerifyPass
from mtptrain.validate import compare_plots
from mtptrain.validate.acceptance import measure_acceptance
from mtptrain.validate.compare import (
    Budget,
    Comparison,
    compare_drafts,
    compared,
    load_comparison,
)
from mtptrain.validate.compare_plots import BY_POSITION, BY_TIME
from mtptrain.validate.compare_text import render_markdown, summary_table, write_comparison
from mtptrain.validate.figures import Lossless, Report, Sampling, assemble, measured_run
from mtptrain.validate.speed import DraftCost, SpeedAt

ORIGIN = Provenance("c0ffee", {}, "a machine", "tiny", {"seed": 0}, {"mtp train": 5.0})
COST = DraftCost(1234, 512, (SpeedAt(1, 40.0, 60.0, 1.5, 0.25), SpeedAt(8, 90.0, 81.0, 0.9, 0.125)))


def _report(draft: str, *accepted: int) -> Report:
    passes = tuple(VerifyPass(2, a, a + 1) for a in accepted)
    tokens = tuple(range(1 + sum(accepted) + len(accepted)))
    requests = [Request(f"{kind}{i}", kind, (1,)) for kind in ("qa", "a|b") for i in range(2)]
    done = [Completion(r, tokens, passes, len(passes), "length") for r in requests]
    run = measured_run(measure_acceptance(done, 2), Sampling(0.0, 2, None, 0, 4), None)
    lossless = Lossless(len(tokens) * 4, 0)
    walked = None if draft == "ngram" else 1.5
    known = {"lossless": lossless, "simulated_acceptance_length": walked}
    return assemble(run, target="tiny", draft=draft, provenance=ORIGIN, **known)


def _trained(folder: Path) -> Path:
    """What a training leaves: its record, curve and clock, whose last note is of a step that was not drawn."""
    stage = StageFolder(folder)
    stage.begin("key")
    (folder / "metrics.csv").write_text(
        "step,train/loss,held_out/simulated_acceptance_length,train/supervised_rows\n"
        "9,2.0,,90\n19,1.5,1.25,190\n39,1.0,1.5,390\n"
    )
    (folder / "clock.csv").write_text("step,seconds,tokens\n19,30,600\n39,60,1200\n59,90,1800\n")
    summary = {"steps": 40, "supervised_rows": 400, "trained_tokens": 1200, "trained_seconds": 60.0}
    stage.complete("key", **summary)
    return folder


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    reports = [_report("mtp", 2, 1, 0), _report("ngram", 0, 0, 1)]
    trainings = [(_trained(tmp_path / "mtp"), Budget(30.0, None, 3)), None]
    lines = [
        compared(report.draft, report, COST, trained)
        for report, trained in zip(reports, trainings, strict=True)
    ]
    return compare_drafts(reports, lines, ORIGIN)


def test_a_training_is_what_its_folder_says(comparison: Comparison) -> None:
    """Rates come from the clock, the curve's times from its notes; what was not trained has none."""
    trained, untrained = (d.training for d in comparison.drafts)
    assert trained is not None and untrained is None
    assert (trained.steps, trained.tokens_per_s) == (40, 20.0)
    points = [(p.seconds, p.tokens, p.simulated_acceptance_length) for p in trained.curve]
    assert points == [(30.0, 600, 1.25), (60.0, 1200, 1.5)]


def test_files_hold_the_same_comparison(comparison: Comparison, tmp_path: Path) -> None:
    """compare.json is read back as it was; md and html stand beside it, and html needs no other file."""
    write_comparison(comparison, tmp_path / "out")
    assert load_comparison(tmp_path / "out" / "compare.json") == comparison
    names = {"compare.json", "compare.md", "compare.html", BY_POSITION, BY_TIME}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    page = (tmp_path / "out" / "compare.html").read_text()
    assert page.count('src="data:image/png;base64,') == page.count("<img") == 2
    for text in ("a|b", "1.50", "n/a", "1,234"):
        assert f">{text}" in page or f" {text}<" in page


def test_one_table_has_every_figure(comparison: Comparison) -> None:
    """A row a figure, a column a draft: lengths with intervals, categories, positions, cost, speed, training."""
    text = render_markdown(comparison)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for row in (
        "| figure | mtp | ngram |",
        "| tokens a step (95 %) | 2.00 [2.00, 2.00] | 1.33 [1.33, 1.33] |",
        "| … a\\|b | 2.00 [2.00, 2.00] | 1.33 [1.33, 1.33] |",
        "| token 1 held, given those before | 0.667 | 0.333 |",
        "| token 2 held, given those before | 0.500 | 0.000 |",
        "| tokens that differ from the target's | 0 of 28 | 0 of 20 |",
        "| parameters | 1,234 | 1,234 |",
        "| cache bytes a token | 512 | 512 |",
        "| cost of proposing, batch 1 | 0.250 | 0.250 |",
        "| speed-up, batch 8 | 0.90 | 0.90 |",
        "| given to train | 30 minutes | n/a |",
        "| training tokens/s | 20 | n/a |",
        "| minutes trained | 1.0 | n/a |",
    ):
        assert row in rows, row
    assert "each head was given 30 minutes to train" in text
    assert f"]({BY_POSITION})" in text and f"]({BY_TIME})" in text


def test_the_summary_has_a_line_a_draft(comparison: Comparison) -> None:
    """What the terminal shows: the same figures, turned."""
    header, _, *lines = summary_table(comparison).splitlines()
    assert header.startswith(
        "| draft | proposes | tokens a step (95 %) | acceptance length (95 %) |"
    )
    assert [line.split(" | ")[0] for line in lines] == ["| mtp", "| ngram"]
    assert len({line.count("|") for line in (header, *lines)}) == 1


def test_silence_counts_in_the_first_figure(tmp_path: Path) -> None:
    """Of a draft that proposes once in three steps, the tokens a step and their interval say so; its acceptance
    length, which stands behind them, cannot."""
    request = [Request(f"r{i}", "qa", (1,)) for i in range(2)]
    done = [Completion(r, tuple(range(6)), (VerifyPass(2, 2, 3),), 3, "length") for r in request]
    run = measured_run(measure_acceptance(done, 2), Sampling(0.0, 2, None, 0, 4), None)
    report = assemble(run, target="tiny", draft="ngram", provenance=ORIGIN)
    line = compared("ngram", report, COST, None)
    rows = render_markdown(compare_drafts([report], [line], ORIGIN)).splitlines()
    at = rows.index("| tokens a step (95 %) | 1.67 [1.67, 1.67] |")
    assert rows[at + 1] == "| acceptance length (95 %) | 3.00 [3.00, 3.00] |"


def test_each_head_says_what_it_was_given_to_train(comparison: Comparison) -> None:
    """By its own settings, where they differ; minutes are said to be those of training alone."""
    head = comparison.drafts[0]
    assert head.training is not None
    other = replace(head, training=replace(head.training, budget=Budget(None, 500, 3)))
    epochs = replace(head, training=replace(head.training, budget=Budget(None, None, 3)))
    text = render_markdown(replace(comparison, drafts=(head, other, epochs)))
    assert "| given to train | 30 minutes | 500 steps | 3 epochs |" in text
    assert "each head was given 3 epochs or 30 minutes or 500 steps to train" in text
    assert "Minutes trained are those of training steps alone" in text


def test_every_draft_says_what_it_proposes(comparison: Comparison) -> None:
    """A tree stands as a tree, whichever draft comes first; what is drawn alike stands above the table."""
    head, lookup = comparison.drafts
    tree = replace(head, sampling=replace(head.sampling, tree="dynamic, 59 nodes, top 10"))
    text = render_markdown(replace(comparison, drafts=(lookup, tree)))
    assert "| proposes | chain D=2 | tree dynamic, 59 nodes, top 10 D=2 |" in text
    assert "\n\nT=0; 4 prompts;" in text


def test_only_what_was_walked_is_drawn_over_time(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training's curve is that of a head's chains: a tree or a hybrid that shares the head has no line of its own."""
    drawn = dict[str, list[str]]()

    def note(
        lines: list[tuple[str, object]], x: str, y: str, out: Path, ticks: object = None
    ) -> None:
        drawn[out.name] = [name for name, _ in lines]

    monkeypatch.setattr(compare_plots, "_plot", note)
    head = comparison.drafts[0]
    others = (replace(head, name=n, simulated_acceptance_length=None) for n in ("tree", "hybrid"))
    compare_plots.plot_comparison(replace(comparison, drafts=(head, *others)), tmp_path)
    assert drawn == {BY_POSITION: ["mtp", "tree", "hybrid"], BY_TIME: ["mtp"]}


def test_warnings_name_their_draft(comparison: Comparison) -> None:
    """What a report warns of is in the comparison too."""
    first = replace(comparison.drafts[0], warnings=("look out",))
    text = render_markdown(replace(comparison, drafts=(first, comparison.drafts[1])))
    assert "| mtp | look out |" in text


def test_other_files_are_refused_in_one_line(comparison: Comparison, tmp_path: Path) -> None:
    """A file that is absent, no JSON, or lacks a key is a UserError with its name."""
    write_comparison(comparison, tmp_path)
    path = tmp_path / "compare.json"
    held = json.loads(path.read_text())
    del held["prompts"]
    for text in (json.dumps(held), "{", None):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(UserError, match="no readable comparison .* run compare again"):
            load_comparison(path)
