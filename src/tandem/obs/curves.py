"""Draw the curves of a run. matplotlib is imported only when a picture is drawn; its global state is not changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tandem.obs.claims import figure_of, printable
from tandem.types import Measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Eval = tuple[int, float]
"""A step, and the held-out measure after it."""

_STAGE_NAMES = {"warmup": "warm-up", "sft": "supervised", "preference": "preferences", "rl": "RL"}


PAPER, INK, MUTED, GRID, _SHADE = "#ffffff", "#1d2329", "#69727c", "#e9ecef", "#f3f5f8"
MAIN, ACCENT, _SIDE = "#2563eb", "#d9480f", "#0d7a6f"
_PLACES = {"left": 0.06, "right": 0.985, "top": 0.88, "bottom": 0.055, "hspace": 0.3, "wspace": 0.28}


@dataclass(frozen=True)
class _Panel:
    title: str
    key: str
    stages: tuple[str, ...]
    """The stages to draw: the losses of SFT and RL are different quantities."""
    whole: bool = False
    """Whether the values are counts, which are drawn as steps from 0."""


_ANY = ("warmup", "sft", "preference", "rl")
_SMALL_PANELS = (
    _Panel("Loss · warm-up", "loss/total", ("warmup",)),
    _Panel("Loss · RL", "loss/total", ("rl",)),
    _Panel("Entropy (nats)", "policy/entropy", ("rl",)),
    _Panel("Reward margin", "reward/margin", ("preference",)),
    _Panel("Pairs ranked right", "reward/accuracy", ("preference",)),
    _Panel("Lag (versions)", "lag/max", ("rl",), whole=True),
    _Panel("Logprob gap", "sync/logprob_gap", ("rl",)),
    _Panel("Gradient norm", "grad/norm", _ANY),
    _Panel("Learning rate", "lr", _ANY),
)


def curves_png(
    rows: Sequence[Row], title: str = "", *, evals: Sequence[Eval] = (), measure: Measure = "accuracy"
) -> bytes:
    """Return a PNG: reward (or loss, in supervised training) with the evaluations; below it, further metrics."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 6.0), dpi=144, facecolor=PAPER)
    FigureCanvasAgg(figure)
    _fill(figure, rows, title, evals, measure)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", facecolor=PAPER, metadata={"Software": None})
    return buffer.getvalue()


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Return means over the last `window` values, without gaps; the first values average fewer."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        finite = [value for value in values[max(0, end - window) : end] if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return means


def _fill(figure: Figure, rows: Sequence[Row], title: str, evals: Sequence[Eval], measure: Measure) -> None:
    has_reward = any("reward/mean" in row for row in rows)
    top = _Panel("Reward", "reward/mean", ("rl",)) if has_reward else _Panel("Loss", "loss/total", _ANY)
    small = [panel for panel in _SMALL_PANELS if _series(rows, panel)[0] and (has_reward or panel.key != top.key)][:4]
    heights = [2.1, 1] if small else [1]
    grid = figure.add_gridspec(len(heights), max(len(small), 1), height_ratios=heights, **_PLACES)
    if title := printable(title):
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK, parse_math=False)
    axes = figure.add_subplot(grid[0, :])
    _dress(axes, f"{top.title} by optimizer step", ticks=10)
    _draw_main(axes, rows, top)
    _draw_evals(axes, evals, measure)
    _shade_stages(axes, rows)
    if axes.get_legend_handles_labels()[0]:
        corner = "lower right" if has_reward else "upper right"
        axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc=corner)
    for column, panel in enumerate(small):
        axes = figure.add_subplot(grid[1, column])
        _dress(axes, panel.title, whole=panel.whole)
        steps, values = _series(rows, panel)
        axes.plot(
            steps,
            values,
            color=_SIDE,
            linewidth=1.3,
            drawstyle="steps-mid" if panel.whole else "default",
            marker="o" if len(steps) == 1 else "",
            markersize=3,
        )
        if panel.whole:
            axes.set_ylim(-0.15, max(1.0, *values) * 1.15)


def _series(rows: Sequence[Row], panel: _Panel) -> tuple[list[int], list[float]]:
    """Return steps and values, with NaN for null; empty if the panel has no number."""
    found = [
        (int(row["step"]), _number(row[panel.key]))
        for row in rows
        if panel.key in row and row.get("stage", "rl") in panel.stages
    ]
    if not any(math.isfinite(value) for _, value in found):
        return [], []
    return [step for step, _ in found], [value for _, value in found]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _dress(axes: Axes, title: str, *, ticks: int = 6, whole: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_facecolor(PAPER)
    axes.set_title(title, loc="left", fontsize=9.5, color=INK, pad=8)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    axes.tick_params(length=0, labelsize=8, colors=MUTED)
    round_steps = [1, 2, 2.5, 5, 10]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=ticks, steps=round_steps, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=whole, nbins=6, steps=round_steps))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:.4g}"))  # no offset above the axis
    axes.margins(x=0.015)


def _shade_stages(axes: Axes, rows: Sequence[Row]) -> None:
    """If there are several stages, mark each by a band with its name; supervised stages are tinted."""
    bands = [
        (stage, [int(row["step"]) for row in members])
        for stage, members in groupby(rows, key=lambda row: str(row.get("stage", "rl")))
    ]
    if len(bands) < 2:
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.06 * (high - low))  # room for the names
    for stage, steps in bands:
        if stage != "rl":
            axes.axvspan(steps[0] - 1, steps[-1], color=_SHADE, linewidth=0, zorder=0)
        axes.annotate(
            _STAGE_NAMES.get(stage, stage),
            ((steps[0] - 1 + steps[-1]) / 2, 1),
            (0, -5),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8.5,
            color=MUTED,
        )


def _draw_main(axes: Axes, rows: Sequence[Row], panel: _Panel) -> None:
    steps, values = _series(rows, panel)
    if not steps:
        return
    window = max(1, len(steps) // 12)
    noun = "mean reward of each step" if panel.key == "reward/mean" else "training loss of each step"
    axes.plot(
        steps,
        values,
        color=MAIN,
        linewidth=1,
        alpha=0.38 if window > 1 else 1,
        label=noun,
        marker="o" if len(steps) == 1 else "",
        markersize=3,
    )
    if window > 1:
        axes.plot(
            steps,
            rolling_mean(values, window),
            color=MAIN,
            linewidth=2.2,
            solid_capstyle="round",
            label=f"rolling mean over {window} steps",
        )


def _draw_evals(axes: Axes, evals: Sequence[Eval], measure: Measure) -> None:
    if not evals:
        return
    from matplotlib.patheffects import withStroke

    steps, values = zip(*sorted(evals), strict=True)
    axes.plot(
        steps,
        values,
        color=ACCENT,
        linewidth=1,
        linestyle=(0, (2, 3)),
        marker="D",
        markersize=6,
        markeredgecolor=PAPER,
        label=f"held-out {measure}",
        zorder=4,
        clip_on=False,
    )
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.08 * (high - low))  # room for the numbers
    numbered = range(len(evals)) if len(evals) <= 6 else (0, len(evals) - 1)
    for index in numbered:
        axes.annotate(
            figure_of(measure, values[index]),
            (steps[index], values[index]),
            (0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            fontweight="bold",
            color=ACCENT,
            path_effects=[withStroke(linewidth=2.5, foreground=PAPER)],
        )
