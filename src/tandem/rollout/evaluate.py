"""Evaluate a policy: play held-out tasks greedily, each once."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.errors import EpisodeFailed, TooManyFailures
from tandem.obs.claims import answers
from tandem.rollout.episode import Setting, play
from tandem.types import Measure, Sampling, Task, Trajectory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One score per task, in task order. A failed episode scores 0, or the lowest reward if that is below 0."""

    scores: list[float]
    played: list[Trajectory]
    failed: int
    measure: Measure

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def all_equal(self) -> str:
        """Example answers if all tasks have one equal score; empty if scores differ, or if all answers are right."""
        score = self.scores[0]
        is_accuracy = self.measure == "accuracy"
        if not self.played or len(set(self.scores)) > 1 or (is_accuracy and score == 1):
            return ""
        one = len(self.scores) == 1
        what = f"w{'as' if one else 'ere'} wrong" if is_accuracy and not score else f"scored {score:g}"
        which = f"the one answer {what}" if one else f"all {len(self.scores)} answers {what}, such as"
        return f"{which}:\n{answers(self.played)}"


def held_out(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """Choose the same tasks in every evaluation of a run: the verdict compares scores in pairs."""
    return random.Random(f"eval:{seed}").sample(list(tasks), min(count, len(tasks)))


async def evaluate(
    setting: Setting,
    tasks: Sequence[Task],
    max_tokens: int,
    *,
    max_failed_share: float = 0.2,
    measure: Measure | None = None,
) -> Evaluation:
    """Play the tasks and score them. `measure`: that of an earlier evaluation. The first one uses accuracy if every
    outcome has a `correct` between 0 and 1, otherwise the reward."""
    failures: list[EpisodeFailed] = []
    greedy = replace(setting, sampling=Sampling(max_tokens=max_tokens, temperature=0.0))

    async def score(index: int, task: Task) -> Trajectory | None:
        try:
            trajectory = await play(greedy, *setting.opened(task), seed=index)
            if measure == "accuracy" and not _has_correct(trajectory):
                raise EpisodeFailed(
                    "no_outcome", f"task {task.id}: its metrics lack `correct`, which earlier evaluations had"
                )
            return trajectory
        except EpisodeFailed as failure:
            _log.warning("evaluation: %s", failure)
            failures.append(failure)
            return None

    played = await asyncio.gather(*(score(index, task) for index, task in enumerate(tasks)))
    failed = sum(trajectory is None for trajectory in played)
    if failed > max_failed_share * len(tasks):
        raise TooManyFailures(
            f"evaluation: {failed} of {len(tasks)} episodes failed, more than environment.max_failed_share = "
            f"{max_failed_share:g} allows; log.txt names each; the first: {failures[0]}"
        )
    if unclosed := sum(trajectory is not None and trajectory.unclosed for trajectory in played):
        _log.warning("evaluation: %d of %d answers score 0: their thinking never ended", unclosed, len(tasks))
    finished = [trajectory for trajectory in played if trajectory is not None]
    found: Measure = measure or ("accuracy" if finished and all(map(_has_correct, finished)) else "reward")

    def scored(trajectory: Trajectory) -> float:
        return trajectory.metrics["correct"] if found == "accuracy" else trajectory.reward

    lowest = min([0.0, *map(scored, finished)])  # where rewards are below 0, a failure must not score better
    return Evaluation([lowest if t is None else scored(t) for t in played], finished, failed, found)


def _has_correct(trajectory: Trajectory) -> bool:
    return 0 <= trajectory.metrics.get("correct", -1) <= 1
