"""One episode: an environment plays a task with a Recorder, and every way that can go wrong becomes data."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.errors import EpisodeFailed, TandemError
from tandem.protocols import Engine, Environment
from tandem.rollout.guard import Blocked, Guarded
from tandem.rollout.recorder import Recorder, Renders
from tandem.types import Outcome, Sampling, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Setting:
    """What all episodes of a run share."""

    environment: Environment
    engine: Engine
    renderer: Renders
    sampling: Sampling
    max_context: int
    engine_deadline_s: float
    episode_timeout_s: float


async def play(setting: Setting, task: Task, opening_ids: list[int], seed: int) -> Trajectory:
    """Raises EpisodeFailed for whatever the environment did, and EngineError for what the engine did."""
    recorder = Recorder(
        setting.engine, setting.renderer, task, opening_ids, setting.sampling,
        max_context=setting.max_context, deadline_s=setting.engine_deadline_s, seed=seed,
    )  # fmt: skip
    limit_s = setting.episode_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            outcome = await Guarded(setting.environment.run(task, recorder), limit_s)
    except Blocked as error:
        raise EpisodeFailed("hung", f"task {task.id}: the environment {error}") from None
    except TimeoutError:
        if recorder.engine_error is not None:
            raise recorder.engine_error from None
        raise EpisodeFailed(
            "hung", f"task {task.id}: no outcome within environment.episode_timeout_s = {limit_s:g} s"
        ) from None
    except TandemError:
        raise
    except Exception as error:
        if recorder.engine_error is not None:
            raise recorder.engine_error from error
        raise EpisodeFailed("raised", f"task {task.id}: {type(error).__name__}: {error}") from error
    if recorder.engine_error is not None:
        raise recorder.engine_error
    return recorder.trajectory(*_checked(task, outcome))


def _checked(task: Task, outcome: object) -> tuple[float, dict[str, float]]:
    if not isinstance(outcome, Outcome):
        raise EpisodeFailed("no_outcome", f"task {task.id}: run() returned {type(outcome).__name__}, not an Outcome")
    metrics: Mapping[str, float] = outcome.metrics
    try:
        numbers = {"reward": float(outcome.reward), **{name: float(value) for name, value in metrics.items()}}
    except (TypeError, ValueError) as error:
        raise EpisodeFailed("not_a_number", f"task {task.id}: {error}") from None
    if not all(math.isfinite(value) for value in numbers.values()):
        raise EpisodeFailed("not_a_number", f"task {task.id}: {numbers}")
    return numbers.pop("reward"), numbers
