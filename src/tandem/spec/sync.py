"""`[sync]`: how a version reaches the engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.spec.base import Spec


class SyncSpec(Spec):
    """Which bridge, and how often."""

    bridge: Literal["inproc"] = "inproc"
    """inproc: engine and trainer share one module; no byte moves."""
    every: int = Field(default=1, ge=1)
    """Publish after every so many steps; at most train.max_lag + 1."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Both ends must have met by then."""
