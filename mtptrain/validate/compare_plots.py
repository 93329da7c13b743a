"""The two plots of a comparison: acceptance against position, acceptance length against training time.

The second is of heads that propose chains: training walks a head's chains and nothing else, so it says nothing of a
token tree, of a chain that is cut, or of a draft around the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path

from mtptrain.run import atomic_write
from mtptrain.validate.compare import Comparison

BY_POSITION, BY_TIME = "acceptance_by_position.png", "length_by_time.png"
Line = tuple[str, Sequence[tuple[float, float]]]


def plot_comparison(comparison: Comparison, folder: Path) -> None:
    """Writes both as PNG."""
    by_position = [
        (d.name, [(k, c) for k, c in enumerate(d.conditional_acceptance, 1) if c is not None])
        for d in comparison.drafts
    ]
    by_time = [
        (d.name, [(p.seconds / 60, p.simulated_acceptance_length) for p in d.training.curve])
        for d in comparison.drafts
        if d.training and d.simulated_acceptance_length is not None
    ]
    places = range(1, max(d.sampling.num_draft_tokens for d in comparison.drafts) + 1)
    _plot(by_position, "drafted token", "conditional acceptance", folder / BY_POSITION, places)
    _plot(by_time, "minutes of training", "simulated acceptance length", folder / BY_TIME)


def _plot(
    lines: Iterable[Line], x: str, y: str, out: Path, ticks: Sequence[int] | None = None
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4))
    for name, points in lines:
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.set(xlabel=x, ylabel=y)
    if axis.has_data():
        axis.legend()
    if ticks is not None:
        axis.set_xticks(ticks)
    figure.tight_layout()
    image = BytesIO()
    figure.savefig(image, format="png", dpi=120)
    pyplot.close(figure)
    atomic_write(out, image.getvalue())
