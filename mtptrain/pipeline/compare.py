"""compare: every draft is trained and validated in a run of its own, then all stand in one table.

The runs share prompts, answers and the store; a draft that needs no training is only validated. Each run skips
what is whole, so a comparison that was cut short, or is asked for one draft more, goes on. It gives up
training drafts at the same time: each has the machine to itself, or its minutes would not be comparable.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from hidden_state_cache.decode import decode
from mtptrain.datasets.base import evenly
from mtptrain.pipeline.contenders import contenders, named
from mtptrain.pipeline.draft import serving_draft, validate
from mtptrain.pipeline.skip import skip
from mtptrain.run import StageFolder, atomic_write, fingerprint, provenance, save_resolved
from mtptrain.session import Session
from mtptrain.train.module import TrainSettings
from mtptrain.validate.compare import (
    Budget,
    CompareSettings,
    Comparison,
    compare_drafts,
    compared,
)
from mtptrain.validate.compare_text import summary_table, write_comparison
from mtptrain.validate.replay import ReplaySettings
from mtptrain.validate.report import load_report
from mtptrain.validate.speed import DraftCost, measure_cost


def compare(session: Session) -> None:
    """Runs all drafts and writes compare.md, compare.html and compare.json."""
    how: CompareSettings = session.settings(CompareSettings, "compare")
    runs = contenders(session)
    costs = dict[str, DraftCost]()
    for name, run in runs.items():
        with named(name):
            session.hold(run.run_dir)
            save_resolved(run.config, run.run_dir)
            validate(run)
            costs[name] = _cost(run, how)
    comparison = _compared(session, runs, costs)
    write_comparison(comparison, session.run_dir)
    print(summary_table(comparison))
    print(f"comparison: {session.run_dir / 'compare.md'}")


def _cost(run: Session, how: CompareSettings) -> DraftCost:
    """A stage of the draft's run: parameters, cache and speed."""
    stage = StageFolder(run.run_dir / "cost")
    key = fingerprint("cost", run.validate_key, how.batch_sizes, how.speed_prompts)
    path = stage.path / "cost.json"
    if not skip(run, "cost", stage, key):
        stage.begin(key)
        settings: ReplaySettings = run.settings(ReplaySettings, "validate")
        cost = measure_cost(
            serving_draft(run),
            evenly(run.eval_prompts, how.speed_prompts),
            run.chat,
            run.engine,
            settings.sampling(float(run.config.temperature), run.seed),
            how.batch_sizes,
            int(run.config.num_draft_tokens),
        )
        atomic_write(path, json.dumps(asdict(cost), indent=2) + "\n")
        stage.complete(key)
    return decode(DraftCost, json.loads(path.read_text("utf-8")))


def _compared(
    session: Session, runs: dict[str, Session], costs: dict[str, DraftCost]
) -> Comparison:
    reports = {name: load_report(run.run_dir / "report.json") for name, run in runs.items()}
    lines = [
        compared(name, reports[name], costs[name], _trained(run)) for name, run in runs.items()
    ]
    spent = {
        f"{name} {stage}": seconds
        for name, report in reports.items()
        for stage, seconds in report.provenance.times.items()
    }
    origin = provenance(session.config, spent)
    return compare_drafts(list(reports.values()), lines, origin)


def _trained(run: Session) -> tuple[Path, Budget] | None:
    """Where this run's training lies, and what its own config gave it; None: what lies there is of another draft."""
    if run.head_config is None:
        return None
    settings: TrainSettings = run.settings(TrainSettings, "train")
    budget = Budget(settings.max_minutes, settings.max_steps, settings.epochs)
    return run.train_stage.path, budget
