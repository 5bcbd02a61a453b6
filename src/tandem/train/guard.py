"""Training that trains nothing ends with an error, however well the run looks otherwise."""

from __future__ import annotations

from typing import Any

from tandem.errors import NonFinite, NothingLearned
from tandem.types import Batch, Metrics

_BAD_STEPS_IN_A_ROW = 3


class Guard:
    """Counts steps in a row that could not be taken, and steps that were taken and moved nothing."""

    def __init__(self, max_idle_steps: int) -> None:
        self.moved = False
        self._max_idle_steps = max_idle_steps
        self._bad, self._idle, self._why = 0, 0, ""

    def state(self) -> dict[str, Any]:
        return {"moved": self.moved, "bad": self._bad, "idle": self._idle, "why": self._why}

    def load(self, state: dict[str, Any]) -> None:
        self.moved, self._bad, self._idle, self._why = state["moved"], state["bad"], state["idle"], state["why"]

    def stepped(self, version: int, batch: Batch, metrics: Metrics) -> None:
        self._bad = 0
        idle = why_idle(batch, metrics)
        if not idle:
            self.moved, self._idle = True, 0
            return
        self._idle, self._why = self._idle + 1, idle
        if self._idle >= self._max_idle_steps:
            raise NothingLearned(
                f"train: {self._idle} steps in a row, up to version {version}, moved nothing: {idle}; "
                "change what is said there, or raise train.max_idle_steps"
            )

    def finish(self, steps: int) -> None:
        if steps and not self.moved:
            raise NothingLearned(f"train: {steps} steps, and none of them moved a weight: {self._why}")

    def set_aside(self, batch: Batch, norm: float, loss: float) -> None:
        self._bad += 1
        if self._bad >= _BAD_STEPS_IN_A_ROW:
            raise NonFinite(
                f"train: {self._bad} batches in a row gave a loss or gradient that is not finite (the last: "
                f"loss {loss}, norm {norm}); lower train.lr or look at the rewards of tasks "
                f"{', '.join(sorted(set(batch.task_ids))[:5])}"
            )


def why_idle(batch: Batch, metrics: Metrics) -> str:
    """Why this step moved no weight; empty if it moved some."""
    if not batch.micro:
        return "no token of the batch had any credit (siblings that all scored alike, for one)"
    if metrics["grad/norm"] == 0:
        return "the gradient was zero"
    if metrics.get("release/skipped") and not metrics.get("update/norm"):
        return "no gradient was finite"
    if metrics.get("update/effective_fraction") == 0:
        return "every update was rounded away (lr too small for precision.master, or a rule that gives nothing)"
    return ""
