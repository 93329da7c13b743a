"""The report of a validation as files: report.json (schema 1) and report.md.

report.json is `asdict` of a Report and nothing else, loading checks every key and type against the same
annotations, and report.md is rendered from the same object. Given up: reading other schemas; a report is
cheap to make again and dear to misread.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hidden_state_cache.decode import decode
from mtptrain.run import atomic_write
from mtptrain.types import UserError
from mtptrain.validate.figures import (
    SCHEMA,
    Baseline,
    Baselines,
    Counts,
    Lossless,
    MeasuredRun,
    Report,
    Sampling,
    Speed,
    assemble,
    measured_run,
)
from mtptrain.validate.report_text import render_markdown, summary_line

__all__ = [
    "SCHEMA",
    "Baseline",
    "Baselines",
    "Counts",
    "Lossless",
    "MeasuredRun",
    "Report",
    "Sampling",
    "Speed",
    "assemble",
    "load_report",
    "measured_run",
    "render_markdown",
    "summary_line",
    "write_report",
]
_AGAIN = "run validate again"


def write_report(report: Report, folder: Path) -> None:
    """Write report.md and then report.json: the second one's presence means both are there.

    Raises ValueError where a figure is NaN or infinite; JSON has no such numbers.
    """
    heading = {"schema": report.schema, "target": report.target, "draft": report.draft}
    text = json.dumps(heading | asdict(report), indent=2, allow_nan=False, ensure_ascii=False)
    atomic_write(folder / "report.md", render_markdown(report))
    atomic_write(folder / "report.json", text + "\n")


def load_report(path: Path) -> Report:
    """Read a report.json.

    Raises UserError for an unreadable file, another schema, or a missing, unknown or mistyped key.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise UserError(f"{path}: no readable report ({fault}); {_AGAIN}") from fault
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{path}: schema {schema!r}, but this version reads {SCHEMA}; {_AGAIN}")
    try:
        return decode(Report, _completed(data))
    except ValueError as fault:
        raise UserError(f"{path}: {fault}; {_AGAIN}") from fault


def _completed(data: dict[str, Any]) -> dict[str, Any]:
    """With the keys that older reports lack, each at the one value that it had then."""
    older = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "block_verify": False}
    older |= {"typical_threshold": 0.0, "typical_alpha": 0.3, "min_confidence": 0.0}

    def run(held: Any) -> Any:
        how = held.get("sampling") if isinstance(held, dict) else None
        if not isinstance(how, dict):
            return held
        return {"tokens_per_step_ci95": None} | held | {"sampling": older | how}

    whole = run({"warnings": []} | data)
    if isinstance(known := whole.get("baselines"), dict):
        whole |= {"baselines": {"suffix": None} | known}
    return whole | {"sampled": run(whole["sampled"])} if "sampled" in whole else whole
