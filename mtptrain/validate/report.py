"""The report of a validation: report.json (schema 1), readable report.md, one line for a terminal.

The dataclasses are the schema: report.json is `asdict` of a Report and nothing else, loading checks
every key and type against the same annotations, and report.md is rendered from the same object, so
that no figure is typed by hand or stands in one file only. A figure that was not measured is null,
with its key kept. Given up: reading other schemas; a report is cheap to make again and dear to
misread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hidden_state_cache.decode import decode
from mtptrain.run import Provenance, atomic_write
from mtptrain.types import UserError
from mtptrain.validate.acceptance import Acceptance, AcceptanceLength, Interval

SCHEMA = 1
Row = tuple[str, ...]
_AGAIN = "run validate again"


@dataclass(frozen=True)
class Sampling:
    """How the run drew its tokens; `tree` names the token tree, None is a chain.

    The last four are those of `SamplingParams` and mean nothing to a greedy run.
    """

    temperature: float
    num_draft_tokens: int
    tree: str | None
    seed: int
    batch_size: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    block_verify: bool = False


@dataclass(frozen=True)
class Baseline:
    """A draft that needs no training, run over the same prompts."""

    tokens_per_step: float | None


@dataclass(frozen=True)
class Baselines:
    """The untrained drafts a trained one has to beat."""

    ngram: Baseline | None = None


@dataclass(frozen=True)
class Lossless:
    """Greedy output with the draft held against plain greedy output, token by token."""

    checked_tokens: int
    mismatches: int


@dataclass(frozen=True)
class Speed:
    """Emitted tokens a second, without and with the draft; `draft_share`: part spent proposing."""

    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float
    draft_share: float | None


@dataclass(frozen=True)
class Counts:
    """What the figures rest on; `tokens` are all output tokens."""

    prompts: int
    passes: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The figures of one decoding run: the report's own, or those of its `sampled` block."""

    sampling: Sampling
    acceptance_length: AcceptanceLength
    tokens_per_step: float | None
    acceptance_rate: float | None
    conditional_acceptance: tuple[float | None, ...]  # [D]
    joint_acceptance: tuple[float, ...]  # [D]
    accepted_histogram: tuple[int, ...]  # [D + 1]
    speed: Speed | None
    counts: Counts


@dataclass(frozen=True, kw_only=True)
class Report(MeasuredRun):
    """report.json, schema 1. None (null) stands for what was not measured."""

    target: str
    draft: str
    baselines: Baselines
    simulated_acceptance_length: float | None
    lossless: Lossless | None
    sampled: MeasuredRun | None
    provenance: Provenance
    warnings: tuple[str, ...] = ()  # what a reader should know before trusting the figures
    schema: int = SCHEMA


def measured_run(acceptance: Acceptance, sampling: Sampling, speed: Speed | None) -> MeasuredRun:
    """Put the acceptance figures of one run beside how it was sampled and how fast it was."""
    return MeasuredRun(
        sampling=sampling,
        acceptance_length=acceptance.acceptance_length,
        tokens_per_step=acceptance.tokens_per_step,
        acceptance_rate=acceptance.acceptance_rate,
        conditional_acceptance=acceptance.conditional_acceptance,
        joint_acceptance=acceptance.joint_acceptance,
        accepted_histogram=acceptance.accepted_histogram,
        speed=speed,
        counts=Counts(acceptance.prompts, acceptance.passes, acceptance.tokens),
    )


def assemble(
    run: MeasuredRun,
    *,
    target: str,
    draft: str,
    provenance: Provenance,
    baselines: Baselines | None = None,
    simulated_acceptance_length: float | None = None,
    lossless: Lossless | None = None,
    sampled: MeasuredRun | None = None,
    warnings: tuple[str, ...] = (),
) -> Report:
    """The report of `run`, with whatever else was measured; what is left out is null."""
    return Report(
        **{field.name: getattr(run, field.name) for field in fields(MeasuredRun)},
        target=target,
        draft=draft,
        baselines=baselines or Baselines(),
        simulated_acceptance_length=simulated_acceptance_length,
        lossless=lossless,
        sampled=sampled,
        provenance=provenance,
        warnings=warnings,
    )


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

    def run(held: Any) -> Any:
        how = held.get("sampling") if isinstance(held, dict) else None
        return held | {"sampling": older | how} if isinstance(how, dict) else held

    whole = run({"warnings": []} | data)
    return whole | {"sampled": run(whole["sampled"])} if "sampled" in whole else whole


def summary_line(report: Report) -> str:
    """The headline as one line for the terminal."""
    length, counts, ngram = report.acceptance_length, report.counts, report.baselines.ngram
    where = f"{_setting(report.sampling)}, {counts.prompts:,} prompts, {counts.passes:,} passes"
    parts = [f"acceptance length {_number(length.value, 2)} {_span(length.ci95, 2)} ({where})"]
    if ngram is not None:
        parts.append(f"n-gram {_number(ngram.tokens_per_step, 2)} tokens a step")
    return "; ".join([*parts, f"lossless: {_lossless(report.lossless)}"])


def render_markdown(report: Report) -> str:
    """report.md: every figure of report.json in tables, with half a sentence on what it means."""
    title = f"# {report.draft} for {report.target}"
    warnings = [f"**Warning:** {warning}" for warning in report.warnings]
    blocks = [title, summary_line(report), *warnings, _headline(report, _compared(report))]
    blocks += _details(report, "##")
    if report.sampled is not None:
        blocks += [
            f"## Sampled run: {_setting(report.sampled.sampling)}",
            _headline(report.sampled),
        ]
        blocks += _details(report.sampled, "###")
    return "\n\n".join([*blocks, "## Provenance", _provenance(report.provenance)]) + "\n"


def _headline(run: MeasuredRun, more: Sequence[Row] = ()) -> str:
    length, counts, sampling = run.acceptance_length, run.counts, run.sampling
    rows: list[Row] = [
        ("acceptance length", _number(length.value), "tokens a verify pass emits, pooled"),
        ("95 % interval", _span(length.ci95), "bootstrap over prompts"),
        (
            "per-request mean",
            _number(length.per_request_mean),
            "mean of each request's own, unpooled",
        ),
        ("tokens per step", _number(run.tokens_per_step), "over all decode steps, proposal or not"),
        ("acceptance rate", _number(run.acceptance_rate), "accepted over drafted tokens"),
        *more,
        (
            "prompts",
            f"{counts.prompts:,}",
            f"in batches of {sampling.batch_size}, seed {sampling.seed}",
        ),
        ("verify passes", f"{counts.passes:,}", "target forwards over a proposal; no prefill"),
        ("output tokens", f"{counts.tokens:,}", "each answer's first one, from prefill, included"),
    ]
    return _table(("figure", "value", "what it is"), rows)


def _compared(report: Report) -> list[Row]:
    ngram, simulated = report.baselines.ngram, report.simulated_acceptance_length
    untrained = _number(ngram.tokens_per_step if ngram else None)
    return [
        ("n-gram tokens per step", untrained, "what the n-gram draft gets without training"),
        ("simulated acceptance length", _number(simulated), "from stored features, not decoded"),
        ("lossless", _lossless(report.lossless), "greedy output against plain greedy output"),
    ]


def _details(run: MeasuredRun, level: str) -> list[str]:
    categories = sorted(run.acceptance_length.by_category.items())
    return [
        f"{level} By category",
        _table(
            ("category", "acceptance length", "95 % interval", "passes"),
            [(n, _number(c.value), _span(c.ci95), f"{c.passes:,}") for n, c in categories],
        ),
        f"{level} By position",
        "Conditional: the token held, given that all before it did. Joint: all up to it held.",
        _table(
            ("drafted token", "conditional", "joint"),
            [(str(k), _number(c), _number(j)) for k, (c, j) in enumerate(_positions(run), start=1)],
        ),
        f"{level} Accepted tokens of a pass",
        _table(("accepted", "passes", "share"), _histogram(run)),
        f"{level} Speed",
        _speed(run.speed),
    ]


def _positions(run: MeasuredRun) -> Iterable[tuple[float | None, float]]:
    return zip(run.conditional_acceptance, run.joint_acceptance, strict=True)


def _histogram(run: MeasuredRun) -> list[Row]:
    passes = max(run.counts.passes, 1)
    counted = enumerate(run.accepted_histogram)
    return [(str(k), f"{count:,}", _number(count / passes)) for k, count in counted]


def _speed(speed: Speed | None) -> str:
    if speed is None:
        return "Not measured."
    rows: list[Row] = [
        ("plain", _number(speed.plain_tokens_per_s, 1), "emitted tokens a second, target alone"),
        ("speculative", _number(speed.speculative_tokens_per_s, 1), "the same with the draft"),
        ("speedup", _number(speed.speedup, 2), "speculative over plain"),
        ("draft share", _number(speed.draft_share), "part of the time spent proposing"),
    ]
    return _table(("figure", "value", "what it is"), rows)


def _provenance(provenance: Provenance) -> str:
    rows: list[Row] = [
        ("commit", provenance.commit),
        ("recipe", provenance.recipe),
        ("hardware", provenance.hardware),
        *((f"versions: {name}", version) for name, version in provenance.versions.items()),
        *((f"seeds: {name}", str(seed)) for name, seed in provenance.seeds.items()),
        *((f"times: {name}, s", _number(time, 1)) for name, time in provenance.times.items()),
    ]
    return _table(("what", "value"), rows)


def _table(header: Row, rows: Iterable[Row]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _setting(sampling: Sampling) -> str:
    shape = "chain" if sampling.tree is None else f"tree {sampling.tree}"
    parts = [f"{shape} D={sampling.num_draft_tokens}", f"T={sampling.temperature:g}"]
    if sampling.temperature:
        parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
        parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        parts += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
        parts += ["verified as a block"] if sampling.block_verify else []
    return ", ".join(parts)


def _lossless(lossless: Lossless | None) -> str:
    if lossless is None:
        return "not checked"
    return f"{lossless.mismatches:,} of {lossless.checked_tokens:,} tokens differ"


def _span(interval: Interval | None, digits: int = 3) -> str:
    return "[n/a]" if interval is None else f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def _number(value: float | None, digits: int = 3) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"
