"""Held-out tasks, played greedily, each once."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.errors import EpisodeFailed, TooManyFailures
from tandem.rollout.episode import Setting, play
from tandem.types import Sampling, Task, Trajectory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One score a task, in the order of the tasks; a failed episode scores 0."""

    scores: list[float]
    played: list[Trajectory]
    failed: int

    @property
    def accuracy(self) -> float:
        return sum(self.scores) / len(self.scores)


def held_out(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """The same tasks in every evaluation of a run: pairs are what the verdict compares."""
    return random.Random(f"eval:{seed}").sample(list(tasks), min(count, len(tasks)))


async def evaluate(
    setting: Setting, tasks: Sequence[Task], max_tokens: int, *, max_failed_share: float = 0.2
) -> Evaluation:
    greedy = replace(setting, sampling=Sampling(max_tokens=max_tokens, temperature=0.0))

    async def score(index: int, task: Task) -> Trajectory | None:
        try:
            return await play(greedy, task, setting.renderer.prompt(task.messages), seed=index)
        except EpisodeFailed as failure:
            _log.warning("evaluation: %s", failure)
            return None

    played = await asyncio.gather(*(score(index, task) for index, task in enumerate(tasks)))
    failed = sum(trajectory is None for trajectory in played)
    if failed > max_failed_share * len(tasks):
        raise TooManyFailures(
            f"evaluation: {failed} of {len(tasks)} episodes failed, more than environment.max_failed_share = "
            f"{max_failed_share:g} allows; log.txt names each"
        )
    if unclosed := sum(trajectory is not None and trajectory.unclosed for trajectory in played):
        _log.warning("evaluation: %d of %d answers score 0: their thinking was never closed", unclosed, len(tasks))
    scores = [0.0 if t is None else t.metrics.get("correct", t.reward) for t in played]
    return Evaluation(scores, [t for t in played if t is not None], failed)
