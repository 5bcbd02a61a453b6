"""What an agent knows of its execution of an attempt: its name, and when its run has cost what it may.

It is written down in the job's directory: the agent after one that was killed goes on as the same execution, and keeps
to the same limits, though the control plane may be away just then.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from tandem.errors import Fenced
from tandem.io import atomic_write
from tandem.io.bounded_json import read_json
from tandem.shapes.agent import CostLimits

KILL_S = 2.0
"""From SIGTERM to SIGKILL, where a run is cancelled."""
LEAVES_S = 4.0
"""What an agent takes to leave the machine."""
_LEAST_S = 0.5
_FILE = "agent.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class CostDeadlines:
    """On the monotonic clock, which all processes of one boot share."""

    stop_at: float = math.inf
    cancel_at: float = math.inf
    leave_at: float = math.inf
    """When the agent leaves the machine, so that it has left when the run has cost what it may."""

    @classmethod
    def from_now_on(cls, told: CostLimits | None) -> CostDeadlines:
        now = time.monotonic()
        return cls() if told is None else cls(now + told.stop_s, now + told.cancel_s, now + told.spent_s - LEAVES_S)

    def demand(self) -> Literal["run", "stop", "cancel"]:
        now = time.monotonic()
        if now >= self.cancel_at:
            return "cancel"
        return "stop" if now >= self.stop_at else "run"

    def check(self) -> None:
        """Fenced if the run has cost what it may: this machine is not paid for any more."""
        if time.monotonic() >= self.leave_at:
            raise Fenced("the run has cost what it may, and the control plane is away; its directory stays here")

    def patience_s(self, most_s: float) -> float:
        """Return how long to wait for an answer: until there is something to do, `most_s` at most."""
        now = time.monotonic()
        due = (self.stop_at, self.cancel_at, self.cancel_at + KILL_S, self.leave_at)
        return min([most_s, *(max(_LEAST_S, at - now) for at in due if at > now)])


def remember(home: Path, instance: str, limits: CostDeadlines) -> None:
    known = {"limits": asdict(limits)} if limits != CostDeadlines() else {}
    atomic_write.write_json(home / _FILE, {"instance": instance, "boot_id": boot_id(), **known})


def remembered(home: Path) -> tuple[str, CostDeadlines]:
    """Return the execution's name and its limits, as an agent before wrote them on this boot; an empty name if none
    did."""
    try:
        told = cast("dict[str, Any]", read_json(home / _FILE))
        if told["boot_id"] != boot_id():
            return "", CostDeadlines()
        return str(told["instance"]), CostDeadlines(**told.get("limits", {}))
    except (OSError, ValueError, KeyError, TypeError):
        return "", CostDeadlines()


def instance_of(home: Path) -> str:
    """Return the name of the execution that has claimed the attempt, on whichever of its hosts it was."""
    return str(cast("dict[str, Any]", read_json(home / _FILE))["instance"])


def boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
