"""How everything that can be asked for is told of, by engines and by trainers: nothing falls back in silence."""

from __future__ import annotations

from typing import Any


def requested(what: Any, why_not: str) -> dict[str, Any]:
    """`why_not`: why it could not be had; empty if it is."""
    return {"requested": what, "engaged": not why_not, "why_not": why_not}
