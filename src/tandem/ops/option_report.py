"""How is told of what may not be had: asked for, there, and why not."""

from __future__ import annotations

from typing import Any


def requested(what: str | bool, why_not: str, **more: Any) -> dict[str, Any]:
    """`why_not`: empty if it is there."""
    return {"requested": what, "engaged": not why_not, "why_not": why_not, **more}
