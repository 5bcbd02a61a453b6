"""Check that an environment returned an Outcome with finite numbers."""

from __future__ import annotations

from typing import cast

from tandem.errors import EpisodeFailed
from tandem.types import MAX_METRICS, MAX_NUMBER, NUMBERS, Outcome


def checked(task_id: str, outcome: object) -> tuple[float, dict[str, float]]:
    """Return the reward and metrics; EpisodeFailed if they are invalid."""
    if not isinstance(outcome, Outcome):
        raise EpisodeFailed(
            "no_outcome",
            f"task {task_id}: run() returned {outcome!r:.80}; return an Outcome, as in `return Outcome(reward=1.0)`",
        )
    try:
        metrics = {str(name): _number(value) for name, value in outcome.metrics.items()}
        if len(metrics) > MAX_METRICS:
            raise ValueError(f"{len(metrics)} metrics; the limit is {MAX_METRICS}")
        return _number(outcome.reward), metrics
    except Exception as error:
        text = f"reward = {outcome.reward!r:.80}, metrics = {outcome.metrics!r:.200}"
        raise EpisodeFailed("not_a_number", f"task {task_id}: {text}: {error}") from error


def _number(value: object) -> float:
    if isinstance(value, str | bytes):
        raise TypeError("a text is not a number")
    number = float(cast(float, value))
    if not abs(number) <= MAX_NUMBER:  # also refuses NaN
        raise ValueError(f"must be finite, {NUMBERS}")
    return number
