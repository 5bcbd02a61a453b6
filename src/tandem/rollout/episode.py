"""One episode: an environment plays a task with a Recorder, and every way that can go wrong becomes data."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from tandem.errors import EpisodeFailed, TemplateError
from tandem.protocols import Engine, Environment
from tandem.rollout.guard import Blocked, Clock, Guarded
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
    thinking_length_penalty: float = 0.0
    clock: Clock = field(default_factory=Clock)


async def play(setting: Setting, task: Task, opening_ids: list[int], seed: int) -> Trajectory:
    """Raises EpisodeFailed for whatever the environment did, and EngineError for what the engine did."""
    recorder = Recorder(
        setting.engine, setting.renderer, task, opening_ids, setting.sampling,
        max_context=setting.max_context, deadline_s=setting.engine_deadline_s, seed=seed, clock=setting.clock,
    )  # fmt: skip
    limit_s = setting.episode_timeout_s
    outcome: object = None
    failure: EpisodeFailed | None = None
    try:
        async with setting.clock.deadline(limit_s) as deadline:
            recorder.deadline = deadline
            run = setting.environment.run(task, recorder)
            outcome = await _outcome(task, Guarded(run, limit_s, partial(setting.clock.stood_still, its_own=deadline)))
    except EpisodeFailed as error:
        failure = error
    except TimeoutError:
        text = f"no outcome within environment.episode_timeout_s = {limit_s:g} s"
        failure = EpisodeFailed("hung", f"task {task.id}: {text}")
    if recorder.engine_error is not None:  # whatever the environment made of it
        raise recorder.engine_error
    if failure is not None:
        raise failure
    reward, metrics = _checked(task, outcome)
    if not recorder.replied:
        raise EpisodeFailed("no_reply", f"task {task.id}: run() returned without a reply of the policy")
    if recorder.unclosed:
        # 0 at most: where a wrong answer costs something, a thought that never ends must not be the cheaper way out.
        reward = min(reward, 0.0)
        if "correct" in metrics:  # what an evaluation goes by
            metrics["correct"] = min(metrics["correct"], 0.0)
    return recorder.trajectory(reward, metrics, -setting.thinking_length_penalty * recorder.thinking_share)


async def _outcome(task: Task, run: Awaitable[object]) -> object:
    """EpisodeFailed for whatever comes out of it, but for being cancelled from outside."""
    try:
        return await run
    except EpisodeFailed:
        raise
    except Blocked as error:
        raise EpisodeFailed("hung", f"task {task.id}: the environment {error}") from error
    except TemplateError as error:
        raise EpisodeFailed("template", f"task {task.id}: {error}") from error
    except (Exception, asyncio.CancelledError) as error:
        this = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and this is not None and this.cancelling():
            raise
        raise EpisodeFailed("raised", f"task {task.id}: {type(error).__name__}: {error}") from error


def _checked(task: Task, outcome: object) -> tuple[float, dict[str, float]]:
    if not isinstance(outcome, Outcome):
        raise EpisodeFailed("no_outcome", f"task {task.id}: run() returned {type(outcome).__name__}, not an Outcome")
    try:
        metrics = {str(name): _number(value) for name, value in outcome.metrics.items()}
        return _number(outcome.reward), metrics
    except Exception as error:
        text = f"reward = {outcome.reward!r:.80}, metrics = {outcome.metrics!r:.200}"
        raise EpisodeFailed("not_a_number", f"task {task.id}: {text}: {error}") from error


def _number(value: object) -> float:
    if isinstance(value, str | bytes):
        raise TypeError("a text is no number")
    number = float(cast(float, value))
    if not math.isfinite(number):
        raise ValueError("it must be finite")
    return number
