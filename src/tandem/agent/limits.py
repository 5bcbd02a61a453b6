"""When a run has cost what it may. The agent keeps to it by itself: the control plane may be away just then."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.shapes.agent import CostLimits

KILL_S = 4.0
"""From SIGTERM to SIGKILL, where a run is cancelled."""
_LEAST_S = 0.5
_LEAVES_S = 2.0
"""What the agent takes to leave the machine."""


@dataclass(frozen=True, slots=True)
class Limits:
    """On the monotonic clock, which all processes of one boot share."""

    stop_at: float = math.inf
    cancel_at: float = math.inf
    spent_at: float = math.inf
    """When the agent begins to leave the machine."""

    @classmethod
    def from_now_on(cls, told: CostLimits | None) -> Limits:
        now = time.monotonic()
        return cls() if told is None else cls(now + told.stop_s, now + told.cancel_s, now + told.spent_s - _LEAVES_S)

    @classmethod
    def from_json(cls, told: Mapping[str, float] | None) -> Limits:
        return cls(**told) if told else cls()

    def demand(self) -> Literal["run", "stop", "cancel"]:
        now = time.monotonic()
        if now >= self.cancel_at:
            return "cancel"
        return "stop" if now >= self.stop_at else "run"

    @property
    def is_spent(self) -> bool:
        return time.monotonic() >= self.spent_at

    def patience_s(self, most_s: float) -> float:
        """Return how long to wait for an answer: until there is something to do, `most_s` at most."""
        now = time.monotonic()
        due = (self.stop_at, self.cancel_at, self.cancel_at + KILL_S, self.spent_at)
        return min([most_s, *(max(_LEAST_S, at - now) for at in due if at > now)])
