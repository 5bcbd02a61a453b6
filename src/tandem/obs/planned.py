"""What was planned beside what was measured, once a run has steps to show."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.io.json_files import read_json
from tandem.obs.history import History, Row, largest, number

_SECONDS = (
    ("rollout_s", "time/generate_s", "rollouts"),
    ("train_s", "time/train_s", "training"),
    ("sync_s", "time/sync_s", "sync"),
)


@dataclass(frozen=True, slots=True)
class Beside:
    what: str
    planned: str
    measured: str
    off_by: str


def against_plan(history: History) -> list[Beside]:
    """Empty without plan.json, or before the first step of `[train]`. Of a step, the medians."""
    plan = _read(history)
    rows = [row for row in history.rows if row.get("stage") != "warmup"]
    if not plan or not rows:
        return []
    found = _row("peak memory, GiB", number(plan.get("trainer_gib")), largest(history.rows, "memory/peak"))
    times = plan.get("times")
    times = times if isinstance(times, Mapping) else {}
    for planned, measured, name in _SECONDS:
        expected = number(times.get(planned))
        if expected:
            found += _row(f"{name}, s a step", expected, _median(rows, measured))
    found += _row("a step, s", number(plan.get("step_s")), _median(rows, "time/step_s"))
    return found


def _row(what: str, planned: float | None, measured: float | None) -> list[Beside]:
    if planned is None or not measured:
        return []
    return [Beside(what, f"{planned:.3g}", f"{measured:.3g}", f"{planned / measured - 1:+.0%}")]


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [value for row in rows if (value := number(row.get(key))) is not None]
    return statistics.median(values) if values else None


def _read(history: History) -> Mapping[str, Any]:
    try:
        plan = read_json(history.directory / "plan.json")
    except (OSError, ValueError):
        return {}
    return plan if isinstance(plan, Mapping) else {}
