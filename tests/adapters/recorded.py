"""Plays an environment with the real Recorder and Renderer; the engine's words are written down, its log is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tandem.rollout.episode import Setting, play
from tandem.rollout.workers.forkserver_client import Order
from tandem.rollout.workers.pool import WorkerEnvironment
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Sampling, Span, Task, Trajectory

RENDERER = Renderer(byte_tokenizer())


class WrittenEngine:
    version = 0

    def __init__(self, turns: Sequence[str] | Callable[[str], str]) -> None:
        """Texts in their order, or a function of the prompt."""
        self._turns = turns
        self.log: list[tuple[list[int], list[int]]] = []

    async def generate(self, prompt_ids, sampling: Sampling, *, session=None, on_token=None) -> Completion:
        await asyncio.sleep(0.001)
        prompt = RENDERER.decode(prompt_ids, skip_special=False)
        text = self._turns(prompt) if callable(self._turns) else self._turns[len(self.log)]
        ids = [*RENDERER.encode(text), RENDERER.end_id][: sampling.max_tokens]
        self.log.append((list(prompt_ids), ids))
        turn = len(self.log)
        reason = "stop" if ids[-1] == RENDERER.end_id else "length"
        return Completion(ids, [-turn / 10] * len(ids), [Span(turn, len(ids))], reason)

    @property
    def prompts(self) -> list[str]:
        return [RENDERER.decode(prompt, skip_special=False) for prompt, _ in self.log]


async def episode(environment: Any, task: Task, engine: WrittenEngine, **settings: Any) -> Trajectory:
    setting = Setting(
        environment=environment, engine=engine, renderer=RENDERER, sampling=Sampling(max_tokens=256),
        max_context=8192, engine_deadline_s=10, episode_timeout_s=settings.pop("episode_timeout_s", 60), **settings,
    )  # fmt: skip
    return await play(setting, task, RENDERER.prompt(task.messages), seed=1)


def played(environment: Any, task: Task, turns: Any, **settings: Any) -> tuple[Trajectory, WrittenEngine]:
    engine = WrittenEngine(turns)
    trajectory = asyncio.run(episode(environment, task, engine, **settings))
    exact(trajectory, engine)
    return trajectory, engine


def played_in_a_worker(name: str, params: dict[str, Any], pick: str, turns: Any) -> Trajectory:
    environment = WorkerEnvironment(Order(name, params, load_timeout_s=120, pass_env=("PYTHONPATH",)), 1)
    engine = WrittenEngine(turns)
    tasks = [task for split in ("train", "eval") for task in environment.tasks(split)]

    async def once() -> Trajectory:
        try:
            return await episode(environment, next(task for task in tasks if task.id == pick), engine)
        finally:
            environment.close()
            await asyncio.sleep(0.05)

    trajectory = asyncio.run(once())
    exact(trajectory, engine)
    return trajectory


def exact(trajectory: Trajectory, engine: WrittenEngine) -> None:
    """The recorded ids are what the engine was given and what it sampled, by its own log."""
    for prompt, sampled in engine.log:
        here = len(prompt) + len(sampled)
        assert trajectory.ids[:here] == prompt + sampled
        assert not any(trajectory.trained[len(prompt) - 1 : len(prompt)])
        assert all(trajectory.trained[len(prompt) : here])
    assert trajectory.num_trained == sum(len(sampled) for _, sampled in engine.log)
    assert len(trajectory.ids) == len(engine.log[-1][0]) + len(engine.log[-1][1])
