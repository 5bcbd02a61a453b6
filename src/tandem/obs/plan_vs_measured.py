"""Compare the plan with the measured values of a run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.io.bounded_json import read_json
from tandem.obs.run_history import History, Row, largest, number

_SECONDS = (
    ("rollout_s", "time/generate_s", "rollouts"),
    ("train_s", "time/train_s", "training"),
    ("sync_s", "time/sync_s", "sync"),
    ("step_s", "time/step_s", "a step"),
)
_ALIKE = 0.1
"""Largest relative difference of tokens per step at which seconds are compared."""

_EMPTY_GIB = 0.45
"""Usual most of a process before its run. A process with more holds something that the plan does not know."""


@dataclass(frozen=True, slots=True)
class Beside:
    what: str
    planned: str
    measured: str
    off_by: str
    """Empty if the two cannot be compared."""


def against_plan(history: History) -> list[Beside]:
    """Return planned and measured values (medians over steps); empty without plan.json or before the first `[train]`
    step.

    If lengths were assumed, the planned memory is for the longest possible sequences, so a higher plan is no error.
    Seconds are compared only on a GPU, and only if a step had about as many tokens as planned; CPUs differ too much.
    """
    plan = _read(history)
    rows = [row for row in history.rows if row.get("stage") != "warmup"]
    if not plan or not rows:
        return []
    work = _table(plan.get("work"))
    assumed = work.get("lengths", "assumed") == "assumed"
    found = _memory(plan, assumed, largest(history.rows, "memory/peak"))
    expected, computed = number(work.get("step_tokens")), _median(rows, "tokens/computed")
    found += _row("tokens of a step", expected, computed, compared=not assumed)
    alike = bool(expected and computed and abs(expected / computed - 1) <= _ALIKE) and plan.get("gpu") != "cpu"
    times = {planned: number(_table(plan.get("times")).get(planned)) or 0.0 for planned, _, _ in _SECONDS}
    if times["step_s"] < 0.99 * (times["rollout_s"] + times["train_s"] + times["sync_s"]):  # with a lag it only waits
        times["rollout_s"] = 0.0
    for planned, measured, name in _SECONDS:
        if seconds := times[planned]:
            found += _row(f"{name}, s", seconds, _median(rows, measured), compared=alike)
    return found


def _memory(plan: Mapping[str, Any], at_most: bool, measured: float | None) -> list[Beside]:
    """Compare the memory of the trainer's process: on a CPU all of it, Python included; on a GPU what torch
    allocates."""
    planned, before = number(plan.get("trainer_gib")), number(plan.get("before_gib"))
    what, more = "most memory allocated on the GPU, GiB", False
    if plan.get("gpu") == "cpu":
        more = before is not None and before > _EMPTY_GIB
        what = f"most memory of the process{f' ({before:.2g} before the run)' * more}, GiB"
    below = at_most and bool(planned and measured and planned > measured)
    found = _row(what, planned, measured, compared=not below and not more)
    return [replace(row, planned=f"at most {row.planned}") for row in found] if at_most else found


def _row(what: str, planned: float | None, measured: float | None, *, compared: bool = True) -> list[Beside]:
    if planned is None or not measured:
        return []
    off = _deviation(planned / measured) if compared else ""
    return [Beside(what, _figure(planned), _figure(measured), off)]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _deviation(ratio: float) -> str:
    """Return a deviation as `+12 %`, or as a factor if it is above two."""
    if 0.5 <= ratio <= 2:
        return f"{ratio - 1:+.0%}".replace("%", " %")
    return f"{ratio:.1f} times" if ratio > 1 else f"1/{1 / ratio:.1f} of it"


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [value for row in rows if (value := number(row.get(key))) is not None]
    return statistics.median(values) if values else None


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read(history: History) -> Mapping[str, Any]:
    try:
        plan = read_json(history.directory / "plan.json")
    except (OSError, ValueError):
        return {}
    return _table(plan)
