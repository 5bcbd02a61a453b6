"""Draw charts with characters: a sparkline in one line of text, a braille curve at the end of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # a braille cell: 2 columns of 4 dots, from the top

Number = float | int | None


def sparkline(values: Sequence[Number], width: int) -> str:
    """Return a sparkline of at most `width` characters; each shows the mean of its values."""
    bins = _bins(values, min(width, len(values)))
    finite = [value for value in bins if value is not None]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span = high - low
    levels = [None if v is None else int((v - low) / span * 7.999) if span > 0 else 3 for v in bins]
    return "".join(" " if level is None else _BLOCKS[level] for level in levels)


def terminal_curve(values: Sequence[Number], width: int = 60, height: int = 8, title: str = "") -> str:
    """Return a line chart of `width` by `height` characters, plus axis labels."""
    bins = _bins(values, min(2 * width, max(len(values), 1)))
    finite = [value for value in bins if value is not None]
    if not finite:
        return f"{title}\n  nothing to draw yet" if title else "nothing to draw yet"
    low, high = min(finite), max(finite)
    if high == low:
        low, high = low - 0.5, high + 0.5
    cells = _plot(bins, low, high, width, height)
    labels = {0: f"{high:.3g}", height - 1: f"{low:.3g}"}
    margin = max(len(label) for label in labels.values()) + 1
    lines = [title] if title else []
    for row in range(height):
        text = "".join(chr(_BRAILLE | cell) for cell in cells[row])
        lines.append(f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}{text}")
    lines.append(" " * (margin + 1) + "└" + "─" * width)
    first, last = "1", str(len(values))
    lines.append(" " * (margin + 2) + first + " " * max(1, width - len(first) - len(last)) + last)
    return "\n".join(lines)


def _plot(bins: list[float | None], low: float, high: float, width: int, height: int) -> list[list[int]]:
    """Return braille cells by row. Vertical strokes join neighbours, so that a steep rise is still a line."""
    cells = [[0] * width for _ in range(height)]
    columns, rows = 2 * width, 4 * height
    previous: int | None = None
    for x in range(columns):
        value = bins[x * len(bins) // columns]
        if value is None:
            previous = None
            continue
        y = round((high - value) / (high - low) * (rows - 1))
        start = y if previous is None else previous + (1 if y > previous else -1 if y < previous else 0)
        for dot in range(min(start, y), max(start, y) + 1):
            cells[dot // 4][x // 2] |= _DOTS[x % 2][dot % 4]
        previous = y
    return cells


def _bins(values: Sequence[Number], count: int) -> list[float | None]:
    """Return the means of `count` slices of about equal length; None for a slice without a number."""
    edges = [index * len(values) // count for index in range(count + 1)] if count else []
    return [_mean(values[start:stop]) for start, stop in pairwise(edges)]


def _mean(values: Sequence[Number]) -> float | None:
    finite = [float(value) for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
