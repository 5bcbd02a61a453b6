"""What needs a person's yes: to submit, to resume, to cancel. The client asks; the model cannot answer.

The yes is a parameter that a resolver fills, so it is not in the schema that the model sees. A client that cannot ask
gets an error with the command that a person can run. A submit also needs a plan of the same spec, target and limit,
made a short time before: so the person is told what was planned, and nothing else is started.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import Elicit
from pydantic import BaseModel, Field

from tandem.assistant.reading import MOST_BYTES

PLAN_S, HOUR_S = 1800.0, 3600.0
ASKS_AN_HOUR = 20


class Yes(BaseModel):
    """A person's answer."""

    yes: bool = Field(description="Do it?")


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a plan says."""

    fits: bool
    text: str
    said: str
    """In a line, for the person who is asked."""

    @classmethod
    def of(cls, fits: bool, text: str, memory_gib: float, seconds: float) -> PlanSummary:
        said = f"{memory_gib:.1f} GiB, {seconds:,.0f} s of steps{'' if fits else '; it does not fit'}"
        return cls(fits, text[: MOST_BYTES // 2], said)


@dataclass(frozen=True)
class Planned:
    """A plan that was shown."""

    at: float
    spec: Mapping[str, Any]
    said: str
    """The planner's estimate, in a line."""


class Spending:
    """The plans that were shown, the questions that were asked, and what was started."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._plans: dict[str, Planned] = {}
        self._asked: dict[str, float] = {}
        self.started: dict[str, str] = {}
        """The run of each plan that was submitted: asked for again, it is the same run."""

    def plan(self, spec: Mapping[str, Any], target: str, max_cost_usd: float, said: str) -> str:
        """Note a plan that is shown; return its digest, which submit wants."""
        digest = digest_of(spec, target, max_cost_usd)
        self._plans[digest] = Planned(self._clock(), spec, said)
        return digest

    def submitted(self, digest: str) -> Mapping[str, Any]:
        """Return the spec of a plan that a person said yes to."""
        return self._plans[digest].spec

    def planned(self, digest: str, spec: Mapping[str, Any], target: str, max_cost_usd: float) -> Planned:
        """Return the plan of exactly this; ToolError if there is none, or it is old."""
        found = self._plans.get(digest)
        if found is None or digest != digest_of(spec, target, max_cost_usd):
            raise ToolError("plan_digest: is not of a plan of this spec, target and max_cost_usd; call plan first")
        if self._clock() - found.at > PLAN_S:
            raise ToolError(f"plan_digest: its plan is older than {PLAN_S / 60:.0f} minutes; call plan again")
        return found

    def ask(self, context: Context, question: str, command: str) -> Elicit[Yes]:
        """Ask a person. `command`: what a person can run where the client cannot ask."""
        able = context.client_capabilities
        if able is None or able.elicitation is None:
            raise ToolError(f"this client cannot ask a person; a person can run: {command}")
        now = self._clock()
        self._asked = {each: at for each, at in self._asked.items() if now - at < HOUR_S}
        if question not in self._asked and len(self._asked) >= ASKS_AN_HOUR:
            raise ToolError(f"{ASKS_AN_HOUR} questions were asked within an hour; a person can run: {command}")
        self._asked[question] = now
        return Elicit(question, Yes)


def digest_of(spec: Mapping[str, Any], target: str, max_cost_usd: float) -> str:
    """Return a digest of all that a person says yes to."""
    content = json.dumps([spec, target, max_cost_usd], sort_keys=True)
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()
