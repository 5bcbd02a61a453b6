"""Report whether a requested option took effect, and if not, why."""

from __future__ import annotations

from typing import Any

AUTO = "auto"
"""Requested where the spec leaves it to Tandem: that never ends a strict run."""


def requested(what: str | bool, why_not: str, **more: Any) -> dict[str, Any]:
    """Return the report of an option. `why_not`: why it did not take effect; empty if it did."""
    return {"requested": what, "engaged": not why_not, "why_not": why_not, **more}
