"""A comparison as people read it: compare.md, and compare.html with its plots inside.

Both are made of the same tables, and the tables of the same object that compare.json is.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mtptrain.run import atomic_write
from mtptrain.validate.acceptance import AcceptanceLength, CategoryAcceptance
from mtptrain.validate.compare import Budget, ComparedDraft, Comparison, save_comparison
from mtptrain.validate.compare_plots import BY_POSITION, BY_TIME, plot_comparison
from mtptrain.validate.figures import Lossless
from mtptrain.validate.report_text import drawing, proposes, provenance_rows
from mtptrain.validate.tables import Row, html_table, number, span, table

STYLE = (
    "body{font-family:sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #ccc;padding:.3em .6em}"
    "td+td{text-align:right}img{max-width:100%}"
)


STEP, LENGTH = "tokens a step (95 %)", "acceptance length (95 %)"
SHAPE = "proposes"
SUMMARY = (SHAPE, STEP, LENGTH, "parameters", "training tokens/s", "minutes trained")
NOTE = (
    "Tokens a step counts every decode step; acceptance length only those with a proposal, which flatters a draft "
    "that is often silent, such as a lookup. Parameters and cache are the draft's own. What proposing costs is its "
    "time in a decode step, in steps of the target alone. Speed counts tokens after prefill. Minutes trained are "
    "those of training steps alone: answers, features, the held-out curve and validation are not in them. n/a "
    "stands for what a draft without training has none of."
)


@dataclass(frozen=True)
class Section:
    """A heading, a sentence under it, and a table or a plot."""

    title: str
    text: str
    header: Row = ()
    rows: Sequence[Row] = ()
    plot: str | None = None


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Plots, compare.html and compare.md, and then compare.json: its presence means that all are there."""
    plot_comparison(comparison, folder)
    atomic_write(folder / "compare.html", render_html(comparison, folder))
    atomic_write(folder / "compare.md", render_markdown(comparison))
    save_comparison(comparison, folder / "compare.json")


def render_markdown(comparison: Comparison) -> str:
    """compare.md; its plots are the files beside it."""
    blocks = [f"# Drafts for {comparison.target}", _opening(comparison)]
    for part in _sections(comparison):
        blocks += [f"## {part.title}", part.text] if part.text else [f"## {part.title}"]
        if part.plot:
            blocks.append(f"![{part.title}]({part.plot})")
        if part.header:
            blocks.append(table(part.header, part.rows))
    return "\n\n".join(blocks) + "\n"


def render_html(comparison: Comparison, folder: Path) -> str:
    """compare.html, one file: the plots that lie in `folder` are inside it."""
    title = escape(f"Drafts for {comparison.target}")
    lines = [f"<h1>{title}</h1>", f"<p>{escape(_opening(comparison))}</p>"]
    for part in _sections(comparison):
        lines += [f"<h2>{escape(part.title)}</h2>", f"<p>{escape(part.text)}</p>"]
        if part.plot:
            image = b64encode((folder / part.plot).read_bytes()).decode()
            lines.append(f'<img alt="{escape(part.title)}" src="data:image/png;base64,{image}">')
        if part.header:
            lines.append(html_table(part.header, part.rows))
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    body = "\n".join(lines)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def summary_table(comparison: Comparison) -> str:
    """A line a draft with what says most, in Markdown."""
    rows = [row for row in _figures(comparison) if row[0] in SUMMARY or "speed-up" in row[0]]
    header, *lines = zip(("draft", *(d.name for d in comparison.drafts)), *rows, strict=True)
    return table(header, lines)


def _opening(comparison: Comparison) -> str:
    budgets = {d.training.budget for d in comparison.drafts if d.training}
    given = " or ".join(sorted(_budget(b) for b in budgets)) or "nothing"
    drawn = drawing(comparison.drafts[0].sampling)
    return f"{drawn}; {comparison.prompts:,} prompts; each head was given {given} to train."


def _budget(budget: Budget) -> str:
    parts = [f"{budget.minutes:g} minutes"] if budget.minutes else []
    parts += [f"{budget.steps:,} steps"] if budget.steps else []
    return " or ".join(parts) or f"{budget.epochs:,} epochs"


def _sections(comparison: Comparison) -> list[Section]:
    names = tuple(d.name for d in comparison.drafts)
    warnings = [(d.name, text) for d in comparison.drafts for text in d.warnings]
    given = "Given that all tokens before it held."
    held_out = "On held-out answers, not decoded; of heads that propose whole chains only."
    return [
        Section("Figures", NOTE, ("figure", *names), _figures(comparison)),
        Section("Acceptance by position", given, plot=BY_POSITION),
        Section("Acceptance length by training time", held_out, plot=BY_TIME),
        *([Section("Warnings", "", ("draft", "warning"), warnings)] if warnings else []),
        Section("Provenance", "", ("what", "value"), provenance_rows(comparison.provenance)),
    ]


def _figures(comparison: Comparison) -> list[Row]:
    """The table itself: a row a figure, a column a draft behind its name."""
    drafts = comparison.drafts
    return [(name, *(cell(d) for d in drafts)) for name, cell in _cells(comparison)]


def _cells(comparison: Comparison) -> Iterator[tuple[str, Callable[[ComparedDraft], str]]]:
    yield SHAPE, lambda d: proposes(d.sampling)
    yield STEP, lambda d: f"{number(d.tokens_per_step, 2)} {span(d.tokens_per_step_ci95, 2)}"
    yield LENGTH, lambda d: _length(d.acceptance_length)
    for name in sorted({n for d in comparison.drafts for n in d.acceptance_length.by_category}):
        yield f"… {name}", lambda d, n=name: _length(d.acceptance_length.by_category.get(n))
    for k in range(max(d.sampling.num_draft_tokens for d in comparison.drafts)):
        yield f"token {k + 1} held, given those before", lambda d, k=k: _at(d, k)
    yield "tokens that differ from the target's", lambda d: _lossless(d.lossless)
    yield "parameters", lambda d: f"{d.cost.parameters:,}"
    yield "cache bytes a token", lambda d: f"{d.cost.cache_bytes_per_token:,}"
    for i, at in enumerate(comparison.drafts[0].cost.speed):
        where = f"batch {at.batch_size}"
        yield f"cost of proposing, {where}", lambda d, i=i: number(d.cost.speed[i].draft_cost)
        yield f"speed-up, {where}", lambda d, i=i: number(d.cost.speed[i].speedup, 2)
    yield "given to train", lambda d: _budget(d.training.budget) if d.training else "n/a"
    yield "training tokens/s", lambda d: number(d.training.tokens_per_s if d.training else None, 0)
    yield "minutes trained", lambda d: number(d.training.seconds / 60 if d.training else None, 1)
    yield "steps trained", lambda d: f"{d.training.steps:,}" if d.training else "n/a"


def _length(length: AcceptanceLength | CategoryAcceptance | None) -> str:
    return f"{number(length.value, 2)} {span(length.ci95, 2)}" if length else "n/a"


def _at(d: ComparedDraft, k: int) -> str:
    return number(d.conditional_acceptance[k] if k < len(d.conditional_acceptance) else None)


def _lossless(held: Lossless | None) -> str:
    return f"{held.mismatches:,} of {held.checked_tokens:,}" if held else "not checked"
