"""How each reward function and each metric of an environment went over a run, for its report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "env/"
_PART = 5  # the first and the last fifth of the steps are compared


def reward_lines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a line for the reward and for each metric of the environment: its mean at the beginning and at the end."""
    played = [row for row in rows if "reward/mean" in row]
    names = sorted({name for row in played for name in row if name.startswith(PREFIX)})
    if not names:
        return []
    return [line for name in ("reward/mean", *names) if (line := _line(played, name))]


def _line(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, str]:
    values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
    if not values:
        return {}
    count = max(1, len(values) // _PART)
    first, last = statistics.fmean(values[:count]), statistics.fmean(values[-count:])
    shown = "reward" if name == "reward/mean" else name.removeprefix(PREFIX)
    return {"name": shown, "first": f"{first:.4g}", "last": f"{last:.4g}", "change": f"{last - first:+.4g}"}
