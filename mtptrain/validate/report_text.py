"""A report as people read it: report.md, and one line for a terminal.

Every figure is taken from the same object that report.json is, so none is typed by hand or stands in one file
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mtptrain.run import Provenance
from mtptrain.validate.figures import MeasuredRun, Report, Sampling, Speed
from mtptrain.validate.tables import Row, number, span, table


def summary_line(report: Report) -> str:
    """The headline as one line for the terminal."""
    length, counts, known = report.acceptance_length, report.counts, report.baselines
    where = f"{setting(report.sampling)}, {counts.prompts:,} prompts, {counts.passes:,} passes"
    parts = [f"acceptance length {number(length.value, 2)} {span(length.ci95, 2)} ({where})"]
    if known.ngram is not None:
        suffix = f", suffix {number(known.suffix.tokens_per_step, 2)}" if known.suffix else ""
        parts.append(f"n-gram {number(known.ngram.tokens_per_step, 2)}{suffix} tokens a step")
    return "; ".join([*parts, f"lossless: {_lossless(report)}"])


def render_markdown(report: Report) -> str:
    """report.md: every figure of report.json in tables, with half a sentence on what it means."""
    title = f"# {report.draft} for {report.target}"
    warnings = [f"**Warning:** {warning}" for warning in report.warnings]
    blocks = [title, summary_line(report), *warnings, _headline(report, _compared(report))]
    blocks += _details(report, "##")
    if report.sampled is not None:
        blocks += [
            f"## Sampled run: {setting(report.sampled.sampling)}",
            _headline(report.sampled),
        ]
        blocks += _details(report.sampled, "###")
    origin = table(("what", "value"), provenance_rows(report.provenance))
    return "\n\n".join([*blocks, "## Provenance", origin]) + "\n"


def _headline(run: MeasuredRun, more: Sequence[Row] = ()) -> str:
    length, counts, sampling = run.acceptance_length, run.counts, run.sampling
    rows: list[Row] = [
        ("acceptance length", number(length.value), "tokens a verify pass emits, pooled"),
        ("95 % interval", span(length.ci95), "bootstrap over prompts"),
        (
            "per-request mean",
            number(length.per_request_mean),
            "mean of each request's own, unpooled",
        ),
        ("tokens per step", number(run.tokens_per_step), "over all decode steps, proposal or not"),
        ("its 95 % interval", span(run.tokens_per_step_ci95), "bootstrap over prompts"),
        ("acceptance rate", number(run.acceptance_rate), "accepted over drafted tokens"),
        *more,
        (
            "prompts",
            f"{counts.prompts:,}",
            f"in batches of {sampling.batch_size}, seed {sampling.seed}",
        ),
        ("verify passes", f"{counts.passes:,}", "target forwards over a proposal; no prefill"),
        ("output tokens", f"{counts.tokens:,}", "each answer's first one, from prefill, included"),
    ]
    return table(("figure", "value", "what it is"), rows)


def _compared(report: Report) -> list[Row]:
    known, simulated = report.baselines, report.simulated_acceptance_length
    ngram, suffix = (number(x.tokens_per_step if x else None) for x in (known.ngram, known.suffix))
    return [
        ("n-gram tokens per step", ngram, "what the n-gram draft gets without training"),
        ("suffix tokens per step", suffix, "the same of suffix decoding, answers one by one"),
        ("simulated acceptance length", number(simulated), "from stored features, not decoded"),
        ("lossless", _lossless(report), "greedy output against plain greedy output"),
    ]


def _details(run: MeasuredRun, level: str) -> list[str]:
    categories = sorted(run.acceptance_length.by_category.items())
    return [
        f"{level} By category",
        table(
            ("category", "acceptance length", "95 % interval", "passes"),
            [(n, number(c.value), span(c.ci95), f"{c.passes:,}") for n, c in categories],
        ),
        f"{level} By position",
        "Conditional: the token held, given that all before it did. Joint: all up to it held.",
        table(
            ("drafted token", "conditional", "joint"),
            [(str(k), number(c), number(j)) for k, (c, j) in enumerate(_positions(run), start=1)],
        ),
        f"{level} Accepted tokens of a pass",
        table(("accepted", "passes", "share"), _histogram(run)),
        f"{level} Speed",
        _speed(run.speed),
    ]


def _positions(run: MeasuredRun) -> Iterable[tuple[float | None, float]]:
    return zip(run.conditional_acceptance, run.joint_acceptance, strict=True)


def _histogram(run: MeasuredRun) -> list[Row]:
    passes = max(run.counts.passes, 1)
    counted = enumerate(run.accepted_histogram)
    return [(str(k), f"{count:,}", number(count / passes)) for k, count in counted]


def _speed(speed: Speed | None) -> str:
    if speed is None:
        return "Not measured."
    rows: list[Row] = [
        ("plain", number(speed.plain_tokens_per_s, 1), "emitted tokens a second, target alone"),
        ("speculative", number(speed.speculative_tokens_per_s, 1), "the same with the draft"),
        ("speedup", number(speed.speedup, 2), "speculative over plain"),
        ("draft share", number(speed.draft_share), "part of the time spent proposing"),
    ]
    return table(("figure", "value", "what it is"), rows)


def provenance_rows(provenance: Provenance) -> list[Row]:
    """What figures came from, line by line."""
    return [
        ("commit", provenance.commit),
        ("recipe", provenance.recipe),
        ("hardware", provenance.hardware),
        *((f"versions: {name}", version) for name, version in provenance.versions.items()),
        *((f"seeds: {name}", str(seed)) for name, seed in provenance.seeds.items()),
        *((f"times: {name}, s", number(time, 1)) for name, time in provenance.times.items()),
    ]


def proposes(sampling: Sampling) -> str:
    """The shape of a proposal, in a few words."""
    shape = "chain" if sampling.tree is None else f"tree {sampling.tree}"
    cut = f", min-confidence {sampling.min_confidence:g}" if sampling.min_confidence else ""
    return f"{shape} D={sampling.num_draft_tokens}{cut}"


def setting(sampling: Sampling) -> str:
    """How tokens were proposed and drawn, in a few words."""
    return f"{proposes(sampling)}, {drawing(sampling)}"


def drawing(sampling: Sampling) -> str:
    """How the target's tokens were drawn."""
    parts = [f"T={sampling.temperature:g}"]
    if sampling.temperature:
        parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
        parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        parts += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
        parts += ["verified as a block"] if sampling.block_verify else []
    if not sampling.lossless:
        how = f"{sampling.typical_threshold:g}, {sampling.typical_alpha:g}"
        parts += [f"accepted as typical ({how}), not lossless"]
    return ", ".join(parts)


def _lossless(report: Report) -> str:
    found = report.lossless
    if not report.sampling.lossless:
        return "no, tokens were accepted as typical"
    if found is None:
        return "not checked"
    return f"{found.mismatches:,} of {found.checked_tokens:,} tokens differ"
