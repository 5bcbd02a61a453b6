"""The data of the report's charts, and the page's scripts with their hashes: no other script may run in the page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tandem.obs.run_history import History, Row, evaluations, number

_MOST_POINTS = 1000  # of a series; more cannot be told apart on a screen
_HERE = Path(__file__).parent
LIBRARY, LIBRARY_STYLE = _HERE / "vendor" / "uplot.min.js", _HERE / "vendor" / "uplot.min.css"

_TITLES = {
    "reward/mean": "Reward",
    "loss/total": "Loss",
    "policy/entropy": "Entropy (nats)",
    "lag/max": "Lag (versions)",
    "sync/logprob_gap": "Logprob gap",
    "grad/norm": "Gradient norm",
    "time/step_s": "Seconds a step",
}
_SHOWN = 6
_RELOAD = "setInterval(() => { if (document.getElementById('reload').checked) location.reload(); }, 60000);"

Series = tuple[str, list[float], list[float | None], bool]
"""Label, steps, values, and whether the points are evaluations."""


@dataclass(frozen=True, slots=True)
class Scripts:
    """What the page may run and look like."""

    library: str
    own: str
    reload: str
    """Of a run that goes on: loads the page again each minute, until its reader switches that off."""
    css: str
    policy: str
    """Sources for the content security policy: the hash of each of the two that draw."""
    reload_policy: str


@cache
def scripts() -> Scripts:
    """Return uPlot with its licence, and the script that draws the charts with it."""
    licence = (_HERE / "vendor" / "uplot.LICENSE").read_text(encoding="utf-8")
    code = LIBRARY.read_text(encoding="utf-8").split("\n", 1)[1]  # its first line is a URL
    library = f"/* uPlot 1.6.32\n{licence}\n*/\n{code}"
    own = (_HERE / "charts.js").read_text(encoding="utf-8")
    css = LIBRARY_STYLE.read_text(encoding="utf-8")
    assert "</" not in library + own + css.replace("</style", "</"), "it would end the page's script"
    return Scripts(library, own, _RELOAD, css, f"{_source(library)} {_source(own)}", _source(_RELOAD))


def chart_data(histories: Sequence[History]) -> Mapping[str, Any] | None:
    """Return the standard charts and every metric of the runs, a series for each run; None if there is no row."""
    if not any(history.rows for history in histories):
        return None
    found = sorted({key for history in histories for row in history.rows for key in row if key != "step"})
    metrics = {key: lines for key in found if (lines := _lines(histories, key))}
    standard = [key for key in _TITLES if key in metrics]
    if "reward/mean" not in standard and "loss/total" in standard:
        standard = ["loss/total", *(key for key in standard if key != "loss/total")]
    charts = [{"title": f"{_TITLES[key]} by optimizer step", "series": metrics[key]} for key in standard[:_SHOWN]]
    if charts:
        charts[0]["series"] = [*charts[0]["series"], *_held_out(histories)]
    return {"charts": charts, "metrics": metrics}


def _lines(histories: Sequence[History], key: str) -> list[Series]:
    lines: list[Series] = []
    for history in histories:
        stages = {str(row.get("stage", "")) for row in history.rows if number(row.get(key)) is not None}
        for stage in sorted(stages) if key == "loss/total" else [""]:  # losses of two stages are different quantities
            rows = [row for row in history.rows if not stage or row.get("stage") == stage]
            steps, values = _points(rows, key)
            if steps:
                parts = [history.directory.name if len(histories) > 1 else "", stage if len(stages) > 1 else ""]
                lines.append((" · ".join(filter(None, parts)) or key, steps, values, False))
    return lines


def _held_out(histories: Sequence[History]) -> list[Series]:
    lines: list[Series] = []
    for history in histories:
        if found := evaluations(history):
            name = f"{history.directory.name} · " if len(histories) > 1 else ""
            steps = [float(each.step) for each in found]
            lines.append((f"{name}held-out {history.measure}", steps, [each.value for each in found], True))
    return lines


def _points(rows: Sequence[Row], key: str) -> tuple[list[float], list[float | None]]:
    """Return steps and values; of a long run, means over equal numbers of steps."""
    found = [(float(row["step"]), value) for row in rows if (value := number(row.get(key))) is not None]
    size = -(-len(found) // _MOST_POINTS) or 1
    parts = [found[at : at + size] for at in range(0, len(found), size)]
    return [part[-1][0] for part in parts], [sum(value for _, value in part) / len(part) for part in parts]


def _source(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
