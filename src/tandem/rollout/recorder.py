"""Record one conversation between an environment and the policy, token by token.

The trajectory joins what the engine was given and what it sampled: opening prompt, sampled ids, template glue, sampled
ids, ... No text is rendered or tokenised twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tandem.errors import EngineError, EngineSilent, EpisodeFailed
from tandem.io.image_parts import has_images, interned
from tandem.io.image_store import ImageStore
from tandem.protocols import Engine, StartingEngine
from tandem.rollout.deadlines import Blocked, Clock
from tandem.rollout.judge import Judge
from tandem.types import NO_VERSION, Completion, Message, PlacedImage, Sampling, Task, Thought, ToolCall, Trajectory

Tools = Sequence[Mapping[str, Any]]


_TOLD_SHARE, _TOLD_S = 1 / 8, 10.0
"""How late the engine may tell an episode of its tokens: within this share of the engine's deadline, and at most so
many seconds. Until the completion is there, they only show that the engine lives, and silence is looked for four times
in a deadline (rollout/deadlines.py)."""


class RecorderRenderer(Protocol):
    """The renderer methods that a recorder uses."""

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]: ...
    def glue(self, messages: Sequence[Message], last_id: int, tools: Tools = ()) -> list[int]: ...
    def visible(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str: ...
    def calls(self, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[str, list[ToolCall]]: ...
    def thought(self, ids: Sequence[int], stop: Sequence[str] = ()) -> Thought | None: ...
    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[list[int], list[bool]]: ...
    def placed(self, messages: Sequence[Message], ids: Sequence[int], begin: int = 0) -> list[PlacedImage]: ...


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """A reply of the policy, as an environment sees it."""

    text: str
    truncated: bool
    tool_calls: Sequence[ToolCall] = ()


class Recorder:
    """A Chat that records. `opening_ids`: the task's messages, rendered once for all siblings. `store`: where images
    are kept that the environment shows; None: it shows none."""

    def __init__(
        self, engine: Engine, renderer: RecorderRenderer, task: Task, opening_ids: Sequence[int], sampling: Sampling, *,
        max_context: int, deadline_s: float, seed: int, clock: Clock, judge: Judge | None = None,
        store: ImageStore | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._renderer, self._task = engine, renderer, task
        self._sampling, self._max_context, self._deadline_s, self._seed = sampling, max_context, deadline_s, seed
        self._clock, self._judge, self._store = clock, judge, store
        self._tools: Tools = ()
        self._calls = self._unreadable_calls = 0
        self._opening_ids = list(opening_ids)
        self._messages: list[Message] = list(task.messages)
        self._said: list[Message] = []
        self._ids: list[int] = []
        self._trained: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._images: list[PlacedImage] = []
        self._turns = 0
        self._replying = False
        self._truncated = False
        self._thoughts: list[Thought | None] = []
        """One per reply."""
        self.deadline: asyncio.Timeout | None = None
        """The episode's deadline; it is suspended while the engine works."""
        self.engine_error: EngineError | None = None
        """Kept separately, so that an environment's broad `except` cannot hide a dead engine."""

    def offer(self, tools: Tools) -> None:
        if self._turns:
            raise EpisodeFailed("raised", f"task {self._task.id}: offer() after the first reply(); offer tools before")
        self._tools = [dict(tool) for tool in tools]

    def say(self, *messages: Message | str) -> None:
        plain = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
        self._said += interned(plain, self._store, f"task {self._task.id}")

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> AssistantTurn:
        if self.engine_error is not None:
            raise Blocked("asked for a reply after the engine had failed")
        if self._replying:
            raise EpisodeFailed(
                "raised", f"task {self._task.id}: reply() while another reply() of this chat is in progress"
            )
        said = list(self._said)
        context = self._context(said)
        new = said if self._ids else [*self._task.messages, *said]
        shown = self._renderer.placed(new, context, len(self._ids)) if has_images(new) else []
        prompt_ids = self._ids + context
        room = self._max_context - len(prompt_ids)
        if room < 1:
            raise EpisodeFailed(
                "context_full",
                f"task {self._task.id}: the conversation fills the context of {self._max_context} tokens",
            )
        most = self._sampling.max_tokens
        sampling = replace(
            self._sampling,
            max_tokens=min(most if max_tokens is None else max_tokens, most, room),
            stop=tuple(stop) or self._sampling.stop,
            seed=self._seed + self._turns,
            images=(*self._images, *shown),
            told_within_s=min(self._deadline_s * _TOLD_SHARE, _TOLD_S),
        )
        self._turns += 1
        self._replying = True
        try:
            completion = await self._generate(prompt_ids, sampling)
        finally:
            self._replying = False
        # Only now: a reply that failed or was cancelled leaves no trace, and the environment may ask again.
        del self._said[: len(said)]
        self._images += shown
        self._add(context, [0.0] * len(context), [NO_VERSION] * len(context), trained=False)
        self._add(completion.ids, completion.logprobs, completion.versions, trained=True)
        self._truncated = completion.finish_reason == "length"
        text = self._renderer.visible(completion.ids, sampling.stop)
        self._thoughts.append(self._renderer.thought(completion.ids, sampling.stop))
        self._messages += [*said, {"role": "assistant", "content": text}]
        calls: list[ToolCall] = []
        if self._tools:
            text, calls = self._renderer.calls(completion.ids, sampling.stop)
            self._calls += len(calls)
            self._unreadable_calls += sum(bool(call.error) for call in calls)
        return AssistantTurn(text, self._truncated, tuple(calls))

    async def judge(self, messages: Sequence[Message], *, max_tokens: int = 512) -> str:
        """Ask the judge. The episode's deadline is suspended meanwhile: the judge has its own."""
        if self._judge is None:
            raise EpisodeFailed(
                "judge", f"task {self._task.id}: no judge is configured; set [environment.judge] in the spec"
            )
        if has_images(messages):
            raise EpisodeFailed("judge", f"task {self._task.id}: a judge takes text only, and was shown an image")
        with self.off_the_clock():
            return await self._judge.ask(messages, max_tokens=max_tokens)

    @property
    def replied(self) -> bool:
        return any(self._trained)

    @property
    def unclosed(self) -> bool:
        return any(thought is not None and not thought.closed for thought in self._thoughts)

    @property
    def thinking_tokens(self) -> int:
        return sum(thought.num_tokens for thought in self._thoughts if thought is not None)

    @property
    def thinking_share(self) -> float:
        """Thinking tokens as a share of the tokens that the replies so far were allowed: 0 to 1."""
        return self.thinking_tokens / (self._sampling.max_tokens * max(1, len(self._thoughts)))

    def trajectory(self, reward: float, metrics: dict[str, float], shaping: float = 0.0) -> Trajectory:
        return Trajectory(
            list(self._ids), list(self._trained), list(self._logprobs), list(self._versions), reward,
            "truncated" if self._truncated else "finished", self._counted(metrics), shaping, self.thinking_tokens,
            self.unclosed, self._task.id, self._messages + self._said, images=list(self._images),
        )  # fmt: skip

    def _context(self, said: Sequence[Message]) -> list[int]:
        tools = [self._tools] if self._tools else []
        if self._ids:
            return self._renderer.glue(said, self._ids[-1], *tools)
        if said or tools:
            return self._renderer.prompt([*self._task.messages, *said], *tools)
        return self._opening_ids

    def _counted(self, metrics: dict[str, float]) -> dict[str, float]:
        if not self._tools:
            return metrics
        return {**metrics, "tool_calls": float(self._calls), "unreadable_tool_calls": float(self._unreadable_calls)}

    def _add(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, trained: bool) -> None:
        self._ids += ids
        self._trained += [trained] * len(ids)
        self._logprobs += logprobs
        self._versions += versions

    @contextmanager
    def off_the_clock(self) -> Generator[None]:
        """Suspend the episode's deadline while it waits for the engine, a judge or a worker process."""
        deadline, started = self.deadline, asyncio.get_running_loop().time()
        due = deadline.when() if deadline is not None else None
        if deadline is None or due is None or deadline.expired():
            yield
            return
        deadline.reschedule(None)
        try:
            yield
        finally:
            with suppress(RuntimeError):  # the episode has ended; a leftover task of the environment asked
                deadline.reschedule(due + asyncio.get_running_loop().time() - started)

    def _engine_is_coming(self) -> bool:
        return isinstance(self._engine, StartingEngine) and self._engine.is_coming

    async def _generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        try:
            with self.off_the_clock():
                async with self._clock.engine_deadline(self._deadline_s, self._engine_is_coming):
                    return await self._engine.generate(
                        prompt_ids, sampling, session=self._task.id, on_token=self._clock.token
                    )
        except EngineError as error:
            self.engine_error = error
            raise
        except TimeoutError:
            self.engine_error = EngineSilent(
                f"engine: no token for any request within engine.deadline_s = {self._deadline_s:g} s; it is dead "
                "(see log.txt), or slow: then raise the deadline"
            )
            raise self.engine_error from None
