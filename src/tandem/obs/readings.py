"""Format numbers for every live view: the panel of a run, `tandem watch` and `tandem rollouts top`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tandem.obs.claims import printable
from tandem.obs.run_history import number

_READINGS = (
    ("reward/mean", "reward", "{:.4g}"),
    ("loss/total", "loss", "{:.4g}"),
    ("eval/accuracy", "accuracy", "{:.1%}"),
    ("eval/reward", "held-out reward", "{:.4g}"),
    ("eval/loss", "held-out loss", "{:.4g}"),
    ("time/tokens_per_s", "tokens/s", "{:,.0f}"),
    ("time/step_s", "s/step", "{:,.3g}"),
    ("lag/max", "lag", "{:.0f}"),
    ("loss/clip_fraction", "clipped", "{:.1%}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("grad/norm", "grad", "{:.3g}"),
    ("lr", "lr", "{:.2g}"),
)


def readings(row: Mapping[str, Any], *, without: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return labels and texts of the numbers in a row of metrics.jsonl. `without`: labels that the caller draws."""
    found = ((label, form, number(row.get(key))) for key, label, form in _READINGS if label not in without)
    return [(label, form.format(value).replace("%", " %")) for label, form, value in found if value is not None]


def clock(seconds: float) -> str:
    """Return a time span as 1:02 or 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def one_line(text: str) -> str:
    """Return foreign text on one line, without control characters."""
    return printable(" ".join(text.split()))
