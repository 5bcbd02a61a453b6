"""End training with an error if it changes no weights."""

from __future__ import annotations

from typing import Any

from tandem.errors import NonFinite, NothingLearned
from tandem.types import Batch, Metrics

_BAD_STEPS_IN_A_ROW = 3
_FIRST_IDLE_STEPS = 20


class Guard:
    """Counts failed steps in a row, and idle steps in a row: steps that changed no weight."""

    def __init__(self, max_idle_steps: int) -> None:
        self.moved = self._learned = False
        self._max_idle_steps = max_idle_steps
        self._first_idle_steps = max(min(_FIRST_IDLE_STEPS, max_idle_steps), max_idle_steps // 5)
        """Limit before the first change. A run without a signal at its start rarely finds one, but a run that learned
        may have idle steps although nothing is wrong."""
        self._bad, self._idle, self._why = 0, 0, ""

    def state(self) -> dict[str, Any]:
        return {
            "moved": self.moved, "learned": self._learned, "bad": self._bad, "idle": self._idle, "why": self._why,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.moved, self._bad, self._idle, self._why = state["moved"], state["bad"], state["idle"], state["why"]
        self._learned = state.get("learned", self.moved)

    def stepped(self, version: int, batch: Batch, metrics: Metrics) -> None:
        if metrics.get("update/stored_fraction"):
            self.moved = True
        if metrics.get("release/skipped"):
            self.bad(batch, f"{metrics['release/skipped']:.0f} gradients that are not finite")
        else:
            self._bad = 0
        why = why_idle(batch, metrics)
        if not why:
            self._idle, self._learned = 0, True
            return
        self._idle, self._why = self._idle + 1, why
        limit = self._max_idle_steps if self._learned else self._first_idle_steps
        if self._idle >= limit:
            raise NothingLearned(
                f"train: {self._idle} steps in a row, up to version {version}, learned nothing: {why}; "
                f"remove this cause, or raise train.max_idle_steps ({self._max_idle_steps})"
            )

    def finish(self, steps: int) -> None:
        if steps and not self.moved:
            raise NothingLearned(f"train: {steps} steps, and none of them changed a weight: {self._why}")

    def bad(self, batch: Batch, what: str) -> None:
        self._bad += 1
        if self._bad >= _BAD_STEPS_IN_A_ROW:
            raise NonFinite(
                f"train: {self._bad} batches in a row gave a loss or gradient that is not finite (the last: {what}); "
                f"lower train.lr, or check the rewards of tasks {', '.join(sorted(set(batch.task_ids))[:5])}"
            )


def why_idle(batch: Batch, metrics: Metrics) -> str:
    """Return why a step learned nothing; empty if it learned. Momentum or a KL term may have changed weights anyway."""
    if not batch.metrics["tokens/credited"]:
        return "no token of the batch had any credit (for example, all siblings had equal rewards)"
    if metrics["grad/norm"] == 0:
        return "no gradient was finite" if metrics.get("release/skipped") else "the gradient was zero"
    if not metrics.get("update/stored_fraction"):
        return "every update was rounded away (lr too small for precision.master, or the optimizer's updates are zero)"
    return ""
