"""Play one episode: an environment plays a task with a Recorder, and every failure becomes an EpisodeFailed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from functools import partial

from tandem.env.outcome_check import checked
from tandem.errors import EpisodeFailed, ImageError, TemplateError
from tandem.io.image_parts import interned
from tandem.io.image_store import ImageStore
from tandem.protocols import Engine, Environment
from tandem.rollout.deadlines import Blocked, Clock, Guarded
from tandem.rollout.judge import Judge
from tandem.rollout.recorder import Recorder, RecorderRenderer
from tandem.types import Sampling, Task, Trajectory

_log = logging.getLogger(__name__)

RETRIED = frozenset({"raised", "hung", "crashed", "out_of_memory", "protocol", "judge"})
"""Kinds of failure that a retry may avoid. An invalid outcome or a full context would fail again."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that all episodes of a run share."""

    environment: Environment
    engine: Engine
    renderer: RecorderRenderer
    sampling: Sampling
    max_context: int
    engine_deadline_s: float
    episode_timeout_s: float
    thinking_length_penalty: float = 0.0
    judge: Judge | None = None
    retries: int = 0
    """How often an episode that hung, crashed or raised is played again, with the same seed."""
    retried: Counter[str] = field(default_factory=Counter[str])
    clock: Clock = field(default_factory=Clock)
    images: ImageStore | None = None
    """Where images are kept that the environment shows; None: the model takes text only."""

    def opened(self, task: Task) -> tuple[Task, list[int]]:
        """Return a task, its images kept and named by their digests, and the ids that it opens with. TemplateError or
        ImageError if they cannot be made."""
        task = replace(task, messages=interned(task.messages, self.images, f"task {task.id}"))
        return task, self.renderer.prompt(task.messages)


async def play(setting: Setting, task: Task, opening_ids: list[int], seed: int) -> Trajectory:
    """Play an episode, with retries. EpisodeFailed for an environment's failure, EngineError for an engine's."""
    for _ in range(setting.retries):
        try:
            return await _play_once(setting, task, opening_ids, seed)
        except EpisodeFailed as failure:
            if failure.kind not in RETRIED:
                raise
            _log.info("the episode is retried: %s", failure)
            setting.retried[failure.kind] += 1
    return await _play_once(setting, task, opening_ids, seed)


async def _play_once(setting: Setting, task: Task, opening_ids: list[int], seed: int) -> Trajectory:
    recorder = Recorder(
        setting.engine, setting.renderer, task, opening_ids, setting.sampling,
        max_context=setting.max_context, deadline_s=setting.engine_deadline_s, seed=seed, clock=setting.clock,
        judge=setting.judge, store=setting.images,
    )  # fmt: skip
    limit_s = setting.episode_timeout_s
    outcome: object = None
    failure: EpisodeFailed | None = None
    try:
        async with setting.clock.deadline(limit_s) as deadline:
            recorder.deadline = deadline
            run = setting.environment.run(task, recorder)
            outcome = await _outcome(
                task, Guarded(run, limit_s, partial(setting.clock.extend_others, except_for=deadline))
            )
    except EpisodeFailed as error:
        failure = error
    except TimeoutError:
        text = f"no outcome within environment.episode_timeout_s = {limit_s:g} s"
        failure = EpisodeFailed("hung", f"task {task.id}: {text}")
    if recorder.engine_error is not None:  # even if the environment swallowed it
        raise recorder.engine_error
    if failure is not None:
        raise failure
    reward, metrics = checked(task.id, outcome)
    if not recorder.replied:
        raise EpisodeFailed("no_reply", f"task {task.id}: run() returned without asking for a reply")
    if recorder.unclosed:
        # 0 at most: where wrong answers cost reward, endless thinking must not be the cheaper choice.
        reward = min(reward, 0.0)
        if "correct" in metrics:  # evaluations use it
            metrics["correct"] = min(metrics["correct"], 0.0)
    return recorder.trajectory(reward, metrics, -setting.thinking_length_penalty * recorder.thinking_share)


async def _outcome(task: Task, run: Awaitable[object]) -> object:
    """Await the outcome; turn every exception into EpisodeFailed, except a cancellation from outside."""
    try:
        return await run
    except EpisodeFailed:
        raise
    except Blocked as error:
        raise EpisodeFailed("hung", f"task {task.id}: the environment {error}") from error
    except (TemplateError, ImageError) as error:
        raise EpisodeFailed("template", f"task {task.id}: {error}") from error
    except (Exception, asyncio.CancelledError) as error:
        this = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and this is not None and this.cancelling():
            raise
        raise EpisodeFailed("raised", f"task {task.id}: {type(error).__name__}: {error}") from error
