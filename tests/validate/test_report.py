"""The report as a file: schema 1 key by key, an exact round trip, and all of it in report.md."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mtptrain.run import Provenance
from mtptrain.types import Completion, Request, UserError, VerifyPass
from mtptrain.validate.acceptance import measure_acceptance
from mtptrain.validate.report import (
    Baseline,
    Baselines,
    Lossless,
    MeasuredRun,
    Report,
    Sampling,
    Speed,
    assemble,
    load_report,
    measured_run,
    render_markdown,
    summary_line,
    write_report,
)

PROVENANCE = Provenance(
    commit="0123abc",
    versions={"torch": "2.13.0"},
    hardware="2 cores",
    recipe="tiny",
    seeds={"train": 7},
    times={"validate": 12.5},
)
RUN_KEYS = set(
    "sampling acceptance_length tokens_per_step tokens_per_step_ci95 acceptance_rate conditional_acceptance "
    "joint_acceptance accepted_histogram counts speed".split()
)
REPORT_KEYS = (
    {"warnings"}
    | RUN_KEYS
    | set(
        "schema target draft baselines simulated_acceptance_length lossless sampled provenance".split()
    )
)
NESTED_KEYS = {
    "sampling": "temperature num_draft_tokens tree seed batch_size top_k top_p min_p block_verify "
    "typical_threshold typical_alpha min_confidence",
    "acceptance_length": "value ci95 per_request_mean by_category",
    "lossless": "checked_tokens mismatches",
    "speed": "plain_tokens_per_s speculative_tokens_per_s speedup draft_share",
    "counts": "prompts passes tokens",
    "provenance": "commit versions hardware recipe seeds times",
    "baselines": "ngram suffix",
}


def answers(category: str, *accepted: int) -> list[Completion]:
    """Three equal answers of one category, each with a pass of D=2 for each of `accepted`."""
    passes = tuple(VerifyPass(2, count, count + 1) for count in accepted)
    tokens = tuple(range(1 + sum(accepted) + len(accepted)))
    names = [f"{category}-{row}" for row in range(3)]
    requests = [Request(name, category, (1,)) for name in names]
    return [Completion(request, tokens, passes, len(passes), "length") for request in requests]


def a_run(temperature: float) -> MeasuredRun:
    completions = answers("math|word", 0, 1, 0) + answers("chat", 2, 1)
    speed = Speed(100.0, 150.0, 1.5, 0.2)
    return measured_run(
        measure_acceptance(completions, 2), Sampling(temperature, 2, None, 3, 8), speed
    )


def full() -> Report:
    return assemble(
        a_run(0.0),
        target="tiny-target",
        draft="mtp",
        provenance=PROVENANCE,
        baselines=Baselines(Baseline(1.3125)),
        simulated_acceptance_length=1.75,
        lossless=Lossless(9812, 0),
        sampled=a_run(1.0),
    )


def bare() -> Report:
    """Nothing but an empty run."""
    empty = measured_run(measure_acceptance([], 2), Sampling(0.0, 2, "4x2", 0, 1), None)
    return assemble(empty, target="tiny-target", draft="mtp", provenance=PROVENANCE)


@pytest.mark.parametrize("report", [full(), bare()], ids=["full", "bare"])
def test_round_trip_gives_the_same_report(report: Report, tmp_path: Path) -> None:
    """What is written is what is read, nulls and all, and no other file is left behind."""
    write_report(report, tmp_path / "new" / "folder")
    assert load_report(tmp_path / "new" / "folder" / "report.json") == report
    assert {p.name for p in (tmp_path / "new/folder").iterdir()} == {"report.json", "report.md"}


@pytest.mark.parametrize("report", [full(), bare()], ids=["full", "bare"])
def test_every_schema_key_is_present(report: Report, tmp_path: Path) -> None:
    """report.json has the keys of schema 1, no more and no fewer, measured or not."""
    write_report(report, tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["schema"] == 1 and data.keys() == REPORT_KEYS
    for name, keys in NESTED_KEYS.items():
        assert data[name] is None or data[name].keys() == set(keys.split()), name
    assert data["sampled"] is None or data["sampled"].keys() == RUN_KEYS
    for part in data["acceptance_length"]["by_category"].values():
        assert part.keys() == {"value", "ci95", "passes"}
    depth = data["sampling"]["num_draft_tokens"]
    lengths = [len(data[n]) for n in ("conditional_acceptance", "joint_acceptance")]
    assert [*lengths, len(data["accepted_histogram"])] == [depth, depth, depth + 1]


def test_nan_is_never_written(tmp_path: Path) -> None:
    """A figure that is not a number stops the writing before any file appears."""
    with pytest.raises(ValueError):
        write_report(dataclasses.replace(full(), tokens_per_step=float("nan")), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2"),
        ({"counts": None}, "counts is no object"),
        ({"tokens_per_step": "1.5"}, "tokens_per_step cannot be '1.5'"),
        ({"extra": 1}, r"unknown fields \['extra'\]"),
        (
            {"lossless": {"mismatches": 0}},
            r"lossless has missing or unknown fields \['checked_tokens'\]",
        ),
    ],
)
def test_other_files_are_refused_in_one_line(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    """Another schema, or a key that is absent, unknown or of the wrong type, is a UserError."""
    write_report(full(), tmp_path)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message) as caught:
        load_report(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_reports_from_before_a_key_was_added_are_read(tmp_path: Path) -> None:
    """What they do not say had one value then: no warning, nothing cut off, tokens verified one by one."""
    write_report(full(), tmp_path)
    path = tmp_path / "report.json"
    data = json.loads(path.read_text())
    del data["warnings"]
    for run in (data, data["sampled"]):
        del run["tokens_per_step_ci95"]
        for key in ("top_k", "top_p", "min_p", "block_verify", "min_confidence"):
            del run["sampling"][key]
        del run["sampling"]["typical_threshold"], run["sampling"]["typical_alpha"]
    del data["baselines"]["suffix"]
    path.write_text(json.dumps(data))
    known = full()
    assert known.sampled is not None
    sampled = dataclasses.replace(known.sampled, tokens_per_step_ci95=None)
    older = dataclasses.replace(known, tokens_per_step_ci95=None, sampled=sampled)
    assert load_report(path) == older
    del data["sampled"]
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"missing or unknown fields \['sampled'\]"):
        load_report(path)


def test_options_of_sampling_stand_beside_the_temperature() -> None:
    """Where something is drawn the setting names what was cut off and how it was verified; T=0 has none."""
    options = {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "block_verify": True}
    for temperature, shown in (
        (1.0, "T=1, top-k 20, top-p 0.9, min-p 0.05, verified as a block, 6 prompts"),
        (0.0, "T=0, 6 prompts"),
    ):
        how = dataclasses.replace(full().sampling, temperature=temperature, **options)
        assert shown in summary_line(dataclasses.replace(full(), sampling=how))


def test_what_was_accepted_as_typical_is_never_called_lossless() -> None:
    """Above T=0 the terminal's line, the table and the setting all say so; a greedy run is what it always was."""
    typical = dataclasses.replace(a_run(1.0).sampling, typical_threshold=0.09)
    for temperature in (1.0, 0.0):
        how = dataclasses.replace(typical, temperature=temperature)
        report = dataclasses.replace(full(), sampling=how, lossless=None)
        said = temperature > 0
        assert ("accepted as typical (0.09, 0.3), not lossless" in summary_line(report)) == said
        text = render_markdown(report)
        assert ("| lossless | no, tokens were accepted as typical |" in text) == said
        assert ("lossless: not checked" in text) != said


def test_both_lookups_stand_beside_the_draft() -> None:
    """The line and the table have what each gets without training."""
    known = Baselines(Baseline(1.3125), Baseline(1.4375))
    report = dataclasses.replace(full(), baselines=known)
    assert "n-gram 1.31, suffix 1.44 tokens a step" in summary_line(report)
    assert "| suffix tokens per step | 1.438 |" in render_markdown(report)


def test_warnings_reach_the_reader() -> None:
    """What is said of a run when its report is put together stands in report.md, under the headline."""
    report = assemble(
        a_run(0.0), target="t", draft="mtp", provenance=PROVENANCE, warnings=("look out",)
    )
    assert "**Warning:** look out" in render_markdown(report)


def test_absent_and_broken_files_are_refused(tmp_path: Path) -> None:
    """A missing file and one that is no JSON are UserErrors."""
    (tmp_path / "broken.json").write_text("{")
    for name in ("absent.json", "broken.json"):
        with pytest.raises(UserError, match="no readable report"):
            load_report(tmp_path / name)


def test_summary_line_reads_like_a_sentence() -> None:
    """The terminal's line carries value, interval, setting, baseline and losslessness."""
    report = full()
    low, high = report.acceptance_length.ci95 or (0.0, 0.0)
    assert summary_line(report) == (
        f"acceptance length 1.80 [{low:.2f}, {high:.2f}] (chain D=2, T=0, 6 prompts, 15 passes); "
        "n-gram 1.31 tokens a step; lossless: 0 of 9,812 tokens differ"
    )
    assert summary_line(bare()) == (
        "acceptance length n/a [n/a] (tree 4x2 D=2, T=0, 0 prompts, 0 passes); "
        "lossless: not checked"
    )


def test_markdown_shows_what_the_json_holds(tmp_path: Path) -> None:
    """report.md has every category, both temperatures, every position and the provenance."""
    write_report(full(), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert summary_line(full()) in text
    rows = ["| math\\|word | 1.333 |", "| chat | 2.500 |", "| 1 | 0.600 | 0.600 |"]
    rows += ["| 2 | 0.333 | 0.200 |", "| 0 | 6 | 0.400 |", "| commit | 0123abc |"]
    rows += ["| versions: torch | 2.13.0 |", "| seeds: train | 7 |"]
    for row in rows:
        assert row in text, row
    assert text.index("| chat ") < text.index("| math") < text.index("Sampled run: chain D=2, T=1")
    assert text.count("### By category") == 1


def test_markdown_tables_are_rectangular() -> None:
    """Every table row has as many cells as its header, whatever was measured."""
    for report in (full(), bare()):
        for block in render_markdown(report).split("\n\n"):
            if block.startswith("|"):
                bars = {line.replace("\\|", "").count("|") for line in block.splitlines()}
                assert len(bars) == 1, block
