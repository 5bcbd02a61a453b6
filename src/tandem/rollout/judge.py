"""Judge models: answer the questions that environments ask by `chat.judge(messages)`.

The process that plays asks the judge and holds its address and key. A worker process has neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from tandem.errors import EpisodeFailed, TandemError
from tandem.protocols import Engine
from tandem.rollout.json_post import JsonPost
from tandem.types import Message, Sampling

if TYPE_CHECKING:
    import httpx


class Judge(Protocol):
    async def ask(self, messages: Sequence[Message], *, max_tokens: int) -> str:
        """Return the judge's answer; EpisodeFailed of kind `judge` if there is none."""
        ...


class JudgeRenderer(Protocol):
    """The renderer methods that EngineJudge uses."""

    def prompt(self, messages: Sequence[Message]) -> list[int]: ...
    def visible(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str: ...


class EngineJudge:
    """Ask the run's own engine, greedily: the judge is the current policy."""

    def __init__(self, engine: Engine, renderer: JudgeRenderer, *, max_context: int, timeout_s: float) -> None:
        self._engine, self._renderer = engine, renderer
        self._max_context, self._timeout_s = max_context, timeout_s

    async def ask(self, messages: Sequence[Message], *, max_tokens: int) -> str:
        prompt_ids = self._renderer.prompt(messages)
        room = self._max_context - len(prompt_ids)
        if room < 1:
            raise EpisodeFailed("judge", f"judge: {len(prompt_ids)} tokens fill the context of {self._max_context}")
        sampling = Sampling(max_tokens=min(max_tokens, room), temperature=0.0)
        try:
            async with asyncio.timeout(self._timeout_s):
                completion = await self._engine.generate(prompt_ids, sampling)
        except TimeoutError as error:
            if isinstance(error, TandemError):
                raise
            raise EpisodeFailed("judge", f"judge: the engine gave no answer within {self._timeout_s:g} s") from error
        return self._renderer.visible(completion.ids)


class RewardModelJudge:
    """Answer with the number that a reward model gives a conversation. It computes on the caller's thread, one
    conversation at a time, so that a number does not depend on what is scored beside it."""

    def __init__(self, score: Callable[[Sequence[Message]], float]) -> None:
        self._score = score

    async def ask(self, messages: Sequence[Message], *, max_tokens: int) -> str:
        return repr(self._score(messages))


class HttpJudge:
    """Ask a server that has OpenAI's chat completions route."""

    def __init__(self, url: str, model: str, key: str, *, timeout_s: float) -> None:
        self._route = JsonPost(url.rstrip("/") + "/chat/completions", key, timeout_s=timeout_s)
        self._url, self._model, self._timeout_s = self._route.url, model, timeout_s

    async def ask(self, messages: Sequence[Message], *, max_tokens: int) -> str:
        import httpx

        body = {"model": self._model, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0.0}
        try:
            return self._content(await self._route.post(body))
        except TimeoutError as error:
            text = f"judge: {self._url} gave no answer within environment.judge.timeout_s = {self._timeout_s:g} s"
            raise EpisodeFailed("judge", text) from error
        except httpx.TransportError as error:
            raise EpisodeFailed("judge", f"judge: {self._url}: {type(error).__name__}: {error}") from error

    def _content(self, response: httpx.Response) -> str:
        if response.status_code != 200:
            text = f"judge: {self._url} answered {response.status_code}: {response.text[:200]}"
            raise EpisodeFailed("judge", text)
        try:
            content = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise EpisodeFailed(
                "judge", f"judge: {self._url}: its answer is not a chat completion: {error!r}"
            ) from error
        return content if isinstance(content, str) else ""
