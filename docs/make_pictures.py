"""Draws the tables of PERFORMANCE.md: `python docs/make_pictures.py`. A test compares the pictures with the tables.

A table is drawn where a comment stands before it, and the picture is shown behind it:

    <!-- picture: NAME | COLUMN | COLUMN ... -->      bars, a panel for each of these columns
    <!-- picture: NAME, log | ... -->                 on a logarithmic scale
    <!-- picture: NAME, 2 labels | ... -->            rows are called by their first two cells
    <!-- picture: NAME, curves | UNIT | UNIT ... -->  curves, a panel for each unit: the column `WHO: UNIT` is how far
                                                      right a point is, and the last column of WHO how high
    <!-- no picture: WHY -->

A cell's first number is its bar, "(7.7 to 8.7)" or "7.7 to 8.7" its range; a row in bold is what runs do now. What
"must be" is a line: a row of that name, or a column of it for the first panel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

PAGE = Path(__file__).with_name("PERFORMANCE.md")
PICTURES = PAGE.parent / "pictures"
_WIDTH, _LABELS, _BARS, _ROW, _GAP = 860, 330, 390, 24, 36
_NOW, _ELSE, _LINE, _TEXT = "#1f6f5c", "#9db4c0", "#b3261e", "#222"
_CURVES = (_NOW, "#7a9e2f", _LINE, "#5a5a8c")
_LEFT, _WIDE, _HIGH = 70, 560, 200
_NUMBER = r"[-−+]?\d[\d,]*(?:\.\d+)?"
_ASKED = re.compile(r"<!-- picture: (?P<name>[\w.-]+)(?P<how>[^|]*)\|(?P<columns>.*)-->$")


@dataclass(frozen=True)
class Table:
    asked: str
    """The comment before it."""
    head: list[str]
    rows: list[list[str]]
    after: str
    """The first line behind it."""


def tables(page: str) -> list[Table]:
    lines, found, at = page.split("\n"), list[Table](), 0
    while at < len(lines):
        begin = at
        while at < len(lines) and lines[at].startswith("|"):
            at += 1
        if at - begin > 2:
            cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin:at]]
            before = [line for line in lines[:begin] if line][-1]
            after = next((line for line in lines[at:] if line), "")
            found.append(Table(before, cells[0], cells[2:], after))
        at += 1
    return found


def number(cell: str) -> float | None:
    cell = re.sub(r"[*`]", "", cell)
    first = re.match(rf"(?:[≤≥<>]|within)?\s*({_NUMBER})", cell)
    return float(first[1].replace(",", "").replace("−", "-")) if first else None


def spread(cell: str) -> tuple[float, float] | None:
    found = re.search(rf"({_NUMBER})(?: to |-)({_NUMBER})", cell)
    if found is None:
        return None
    low, high = (float(each.replace(",", "")) for each in found.groups())
    return (low, high) if low < high else None


def pictures(page: str) -> dict[str, str]:
    """By their names."""
    drawn: dict[str, str] = {}
    for table in tables(page):
        if asked := _ASKED.match(table.asked):
            draw = _curves if "curves" in asked["how"] else _bars
            drawn[asked["name"]] = draw(table, asked["how"], [each.strip() for each in asked["columns"].split("|")])
    return drawn


def _picture(parts: Sequence[str], height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{_TEXT}">\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _bars(table: Table, how: str, columns: Sequence[str]) -> str:
    labels, log = (2 if "2 labels" in how else 1), "log" in how
    must = next((row for row in table.rows if row[0].startswith("must be")), None)
    parts: list[str] = []
    top = 8
    for panel, column in enumerate(columns):
        at = table.head.index(column)
        rows = [row for row in table.rows if row is not must and number(row[at]) is not None]
        limit = number(must[at]) if must else None
        if limit is None and panel == 0:
            limits = {number(row[n]) for n, name in enumerate(table.head) if name.startswith("must be") for row in rows}
            limit = (limits - {None}).pop() if len(limits - {None}) == 1 else None
        parts += _panel(column, rows, at, labels, limit, log, top)
        top += 26 + _ROW * len(rows) + _GAP - 20
    return _picture(parts, top + 4)


def _panel(
    column: str, rows: Sequence[list[str]], at: int, labels: int, limit: float | None, log: bool, top: int
) -> list[str]:
    values = [number(row[at]) or 0.0 for row in rows]
    highs = [between[1] for row in rows if (between := spread(row[at]))]
    most = max([abs(each) for each in values] + highs + ([limit] if limit else [])) or 1.0
    least = min(abs(each) for each in [*values, limit or math.inf] if each) / 2 if log else 0.0

    def x(value: float) -> float:
        value = abs(value)
        if log:
            return _BARS * max(0.0, math.log(value / least) / math.log(most / least)) if value else 0.0
        return _BARS * value / most

    scale = ", logarithmic" if log else ""
    parts = [f'<text x="{_LABELS}" y="{top + 14}" font-weight="bold">{escape(column)}{scale}</text>']
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        y = top + 24 + _ROW * index
        now = "**" in row[at] or "**" in row[0]
        label = ", ".join(_plain(cell) for cell in row[:labels] if cell)
        parts.append(f'<text x="{_LABELS - 8}" y="{y + 14}" text-anchor="end">{escape(_cut(label))}</text>')
        fill = _NOW if now else _ELSE
        parts.append(f'<rect x="{_LABELS}" y="{y + 2}" width="{x(value):.1f}" height="{_ROW - 8}" fill="{fill}"/>')
        end = x(value)
        if between := spread(row[at]):
            low, high = (_LABELS + x(each) for each in between)
            parts.append(f'<path d="M{low:.1f} {y + 10}H{high:.1f}" stroke="{_TEXT}" stroke-width="2"/>')
            end = max(end, high - _LABELS)
        if limit is not None and end < x(limit) < end + 60:
            end = x(limit)  # the line would cross the number
        told = escape(_plain(row[at]).partition(" (")[0][:24])
        parts.append(f'<text x="{_LABELS + end + 6:.1f}" y="{y + 14}">{told}</text>')
    if limit is not None:
        line, bottom = _LABELS + x(limit), top + 22 + _ROW * len(rows)
        parts.append(f'<path d="M{line:.1f} {top + 20}V{bottom}" stroke="{_LINE}" stroke-width="2"/>')
        parts.append(f'<text x="{line:.1f}" y="{top + 14}" fill="{_LINE}" text-anchor="middle">must be</text>')
    return parts


def _curves(table: Table, how: str, units: Sequence[str]) -> str:
    columns: dict[str, dict[str, list[float]]] = {}
    for at, name in enumerate(table.head):
        who, apart, unit = name.partition(": ")
        if apart:
            columns.setdefault(who, {})[unit] = [number(row[at]) or 0.0 for row in table.rows]
    parts, top = list[str](), 8
    for unit in units:
        parts += _curve_panel(unit, columns, top)
        top += 26 + _HIGH + _GAP + 12
    return _picture(parts, top - 12)


def _curve_panel(unit: str, columns: dict[str, dict[str, list[float]]], top: int) -> list[str]:
    """A curve for each who; the axes end with the largest numbers of all."""
    ends = {who: list(of)[-1] for who, of in columns.items()}
    widest = max(columns[who][unit][-1] for who in ends) or 1.0
    highest = max(max(columns[who][last]) for who, last in ends.items()) or 1.0
    floor = top + 26 + _HIGH
    height = next(iter(ends.values()))
    parts = [
        f'<text x="{_LEFT}" y="{top + 14}" font-weight="bold">{escape(height)}, by {escape(unit)}</text>',
        f'<path d="M{_LEFT} {top + 26}V{floor}H{_LEFT + _WIDE}" fill="none" stroke="{_TEXT}"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        x, y = _LEFT + _WIDE * share, floor - _HIGH * share
        parts.append(f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{_shown(widest * share)}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_shown(highest * share)}</text>')
    for index, (who, of) in enumerate(columns.items()):
        pairs = zip(of[unit], of[ends[who]], strict=True)
        points = [(_LEFT + _WIDE * x / widest, floor - _HIGH * y / highest) for x, y in pairs]
        colour = _CURVES[index % len(_CURVES)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        x, y = _LEFT + _WIDE + 20, top + 40 + _ROW * index
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{escape(_cut(who, 28))}</text>')
    return parts


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plain(cell: str) -> str:
    return re.sub(r"[*`]", "", cell)


def _cut(label: str, most: int = 46) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    drawn = pictures(PAGE.read_text(encoding="utf-8"))
    for left in PICTURES.glob("*.svg"):
        if left.stem not in drawn:
            left.unlink()
    for name, picture in drawn.items():
        (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
