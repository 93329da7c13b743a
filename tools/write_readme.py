"""Writes the measured figures into README.md from the files in docs/results/.

A published number is never typed: `--take RUN_DIR NAME` copies a run's report and its curve (`--take RUN_DIR
compare`: a comparison), the last line of a benchmark goes to bench-NAME.json, and this script renders the blocks
between `<!-- figures:NAME -->` and `<!-- end -->`. `--check` fails when README.md is out of step. It gives up
prose: words around the blocks are written by hand.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mtptrain.validate.compare import load_comparison
from mtptrain.validate.compare_text import summary_table
from mtptrain.validate.report import Report, load_report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
LENGTH, TRAINED = "held_out/simulated_acceptance_length", "train/supervised_rows"
BLOCK = re.compile(r"(<!-- figures:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def headline() -> str:
    """The runs of the main job, and what their stages took (features are taken during prepare)."""
    runs = [("`mtptrain fit`", "smollm2"), ("`mtptrain fit recipe=smollm2-long`", "smollm2-long")]
    shorter = ("its head, `validate.max_new_tokens=256`", "smollm2-long-256")
    lines = [_runs([*runs, shorter])]
    for name, stem in runs:
        path = RESULTS / f"{stem}.json"
        if path.exists():
            times = load_report(path).provenance.times
            stages = ("prepare", "train", "validate")
            spent = [f"{stage} {times[stage] / 60:.1f}" for stage in stages if stage in times]
            lines.append(f"\nMinutes of {name}: {', '.join(spent)}.\n")
    return "".join(lines)


def ablation() -> str:
    names = sorted(RESULTS.glob("norms-*.json"))
    return _runs([(f"`{path.stem}`", path.stem) for path in names])


def benchmarks() -> str:
    rows = []
    for path in sorted(RESULTS.glob("bench-*.json")):
        r = json.loads(path.read_text())
        ours, reference = (f"{r[key]:,.1f}" if r[key] else "n/a" for key in ("ours", "reference"))
        ratio = f"{r['ratio']:.2f}" if r["ratio"] else "n/a"
        rows.append(
            [f"`tools/bench_{r['name']}.py`", ours, reference, r["unit"], ratio, r["machine"]]
        )
    return table(["benchmark", "ours", "reference", "unit", "ratio", "machine"], rows)


def curve() -> str:
    """Held-out acceptance length of the long run while it trained."""
    path = RESULTS / "smollm2-long-curve.csv"
    if not path.exists():
        return ""
    with path.open(newline="") as file:
        points = [(float(row[TRAINED]), float(row[LENGTH])) for row in csv.DictReader(file)]
    tokens = [f"{rows / 1000:,.0f}k" for rows, _ in points]
    return table(["trained tokens", *tokens], [["simulated", *(f"{al:.2f}" for _, al in points)]])


def compared() -> str:
    """A line a draft of the published comparison, and what it was measured on."""
    path = RESULTS / "compare.json"
    if not path.exists():
        return ""
    comparison = load_comparison(path)
    origin = comparison.provenance
    where = f"{comparison.prompts:,} prompts, {origin.hardware}, commit `{origin.commit[:8]}`"
    return f"{summary_table(comparison)}\n\n{where}.\n"


def take(run_dir: Path, name: str) -> None:
    """Copies what is published of a run: a comparison, or a report and the points of its held-out curve."""
    if name == "compare":
        shutil.copy(run_dir / "compare.json", RESULTS)
        return
    shutil.copy(run_dir / "report.json", RESULTS / f"{name}.json")
    with (run_dir / "train" / "metrics.csv").open(newline="") as file:
        points = [row for row in csv.DictReader(file) if row.get(LENGTH)]
    with (RESULTS / f"{name}-curve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", TRAINED, LENGTH], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(points)


def _runs(named: Sequence[tuple[str, str]]) -> str:
    rows = []
    for name, stem in named:
        path = RESULTS / f"{stem}.json"
        if path.exists():
            rows.append([name, *_cells(load_report(path))])
    header = [
        "run",
        "acceptance length (95 %)",
        "tokens a step",
        "n-gram",
        "T=1",
        "tokens that differ",
    ]
    return table([*header, "commit"], rows)


def _cells(r: Report) -> list[str]:
    al, low_high = r.acceptance_length.value, r.acceptance_length.ci95
    interval = f" [{low_high[0]:.2f}, {low_high[1]:.2f}]" if low_high else ""
    ngram = r.baselines.ngram
    sampled = r.sampled.acceptance_length.value if r.sampled else None
    lossless = f"{r.lossless.mismatches} of {r.lossless.checked_tokens:,}" if r.lossless else "n/a"
    return [
        f"**{al:.2f}**{interval}",
        f"{r.tokens_per_step:.2f}",
        f"{ngram.tokens_per_step:.2f}" if ngram and ngram.tokens_per_step else "n/a",
        f"{sampled:.2f}" if sampled else "n/a",
        lossless,
        f"`{r.provenance.commit[:8]}`",
    ]


BLOCKS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "ablation": ablation,
    "benchmarks": benchmarks,
    "curve": curve,
    "compare": compared,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of step")
    parser.add_argument("--take", nargs=2, metavar=("RUN_DIR", "NAME"), help="publish a run first")
    args = parser.parse_args()
    if args.take:
        take(Path(args.take[0]), args.take[1])
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = BLOCK.sub(lambda m: m[1] + BLOCKS[m[2]]() + m[3], old)
    if args.check:
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
