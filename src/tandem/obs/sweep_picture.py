"""Draw a sweep: a row for each setting, with a dot for each of its runs before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from tandem.obs.claims import printable
from tandem.obs.curves import ACCENT, GRID, INK, MAIN, MUTED, PAPER


@dataclass(frozen=True, slots=True)
class PictureRow:
    label: str
    before: Sequence[float]
    after: Sequence[float]
    """Of each run that succeeded."""
    is_best: bool = False


def sweep_svg(rows: Sequence[PictureRow], title: str, measure: str) -> bytes:
    """Return an SVG. The best setting has another colour; a row without a dot has no run that succeeded."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 1.4 + 0.3 * len(rows)), facecolor=PAPER, layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_facecolor(PAPER)
    axes.set_title(printable(title), loc="left", fontsize=11, fontweight="bold", color=INK, pad=10, parse_math=False)
    for at, row in enumerate(rows):
        colour = ACCENT if row.is_best else MAIN
        axes.scatter(row.before, [at] * len(row.before), s=24, facecolors="none", edgecolors=MUTED, linewidths=1)
        axes.scatter(row.after, [at] * len(row.after), s=26, color=colour, alpha=0.75, linewidths=0)
        if row.after:
            axes.scatter([sum(row.after) / len(row.after)], [at], s=170, marker="|", color=colour, linewidths=2)
    axes.set_yticks(range(len(rows)), [printable(row.label) for row in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
    axes.set_xlabel(f"held-out {measure}: hollow before, filled after, the line is the mean", fontsize=8.5, color=MUTED)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    buffer = BytesIO()
    with mpl.rc_context({"svg.hashsalt": "sweep", "svg.fonttype": "none"}):  # the same sweep gives the same bytes
        figure.savefig(buffer, format="svg", facecolor=PAPER, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
