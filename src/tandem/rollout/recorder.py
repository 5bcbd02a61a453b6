"""One conversation with the policy, recorded token by token.

The trajectory is the concatenation of what the engine was given and what it sampled: opening prompt, sampled ids,
template glue, sampled ids, ... Nothing is rendered or tokenised twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tandem.errors import EngineError, EngineSilent, EpisodeFailed
from tandem.protocols import Engine
from tandem.types import NO_VERSION, Completion, Message, Sampling, Task, Trajectory


class Renders(Protocol):
    """What a recorder needs of a renderer."""

    def prompt(self, messages: Sequence[Message]) -> list[int]: ...
    def glue(self, messages: Sequence[Message], last_id: int) -> list[int]: ...
    def visible(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str: ...
    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """The assistant's turn as an environment sees it."""

    text: str
    truncated: bool


class Recorder:
    """A Chat. `opening_ids` are the task's messages, rendered once for all siblings."""

    def __init__(
        self, engine: Engine, renderer: Renders, task: Task, opening_ids: Sequence[int], sampling: Sampling, *,
        max_context: int, deadline_s: float, seed: int,
    ) -> None:  # fmt: skip
        self._engine, self._renderer, self._task = engine, renderer, task
        self._sampling, self._max_context, self._deadline_s, self._seed = sampling, max_context, deadline_s, seed
        self._opening_ids = list(opening_ids)
        self._messages: list[Message] = list(task.messages)
        self._said: list[Message] = []
        self._ids: list[int] = []
        self._trained: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._turns = 0
        self._truncated = False
        self.engine_error: EngineError | None = None
        """Kept apart from the episode's own errors: an environment's broad `except` must not hide a dead engine."""

    def say(self, *messages: Message | str) -> None:
        for message in messages:
            self._said.append({"role": "user", "content": message} if isinstance(message, str) else message)

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        self._add_context()
        room = self._max_context - len(self._ids)
        if room < 1:
            raise EpisodeFailed(
                "context_full",
                f"task {self._task.id}: the conversation fills the context of {self._max_context} tokens",
            )
        sampling = replace(
            self._sampling,
            max_tokens=min(max_tokens or self._sampling.max_tokens, self._sampling.max_tokens, room),
            stop=tuple(stop) or self._sampling.stop,
            seed=self._seed + self._turns,
        )
        completion = await self._generate(sampling)
        self._ids += completion.ids
        self._trained += [True] * len(completion.ids)
        self._logprobs += completion.logprobs
        self._versions += completion.versions
        self._turns += 1
        self._truncated = completion.finish_reason == "length"
        text = self._renderer.visible(completion.ids, sampling.stop)
        self._messages.append({"role": "assistant", "content": text})
        return Turn(text, self._truncated)

    def trajectory(self, reward: float, metrics: dict[str, float]) -> Trajectory:
        return Trajectory(
            self._ids, self._trained, self._logprobs, self._versions, reward,
            "truncated" if self._truncated else "finished", metrics, self._task.id, self._messages + self._said,
        )  # fmt: skip

    def _add_context(self) -> None:
        if self._ids:
            context = self._renderer.glue(self._said, self._ids[-1])
        elif self._said:
            context = self._renderer.prompt([*self._task.messages, *self._said])
        else:
            context = self._opening_ids
        self._messages += self._said
        self._said = []
        self._ids += context
        self._trained += [False] * len(context)
        self._logprobs += [0.0] * len(context)
        self._versions += [NO_VERSION] * len(context)

    async def _generate(self, sampling: Sampling) -> Completion:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._engine.generate(self._ids, sampling, session=self._task.id)
        except EngineError as error:
            self.engine_error = error
            raise
        except TimeoutError:
            self.engine_error = EngineSilent(
                f"engine: no answer within engine.deadline_s = {self._deadline_s:g} s; it is overloaded (lower "
                "engine.max_running or train.max_tokens) or dead (see log.txt)"
            )
            raise self.engine_error from None
