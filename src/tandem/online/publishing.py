"""The engine as far as the trainer process may ask for it: while a version is published, and that version alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from tandem.errors import EngineError, NotKnown, SyncError
from tandem.io.engine_messages import served_as_json, served_of
from tandem.online.messages import Asked, Attach, CanarySample, Load
from tandem.protocols import DigestedEngine, OnToken, WeightSource
from tandem.types import Completion, Sampling, Served, Span

Ask = Callable[[Asked], Awaitable[dict[str, Any]]]


class RelayedSource(WeightSource, Protocol):
    @property
    def reply(self) -> Mapping[str, Any]: ...


class Publishing:
    def __init__(
        self,
        engine: DigestedEngine,
        open_source: Callable[[Mapping[str, Any]], RelayedSource],
        active: Callable[[], int],
    ) -> None:
        """`active`: the version that was committed last."""
        self._engine, self._open_source, self._active = engine, open_source, active
        self._source: RelayedSource | None = None
        self._under_way = False

    @contextmanager
    def under_way(self) -> Iterator[None]:
        self._under_way = True
        try:
            yield
        finally:
            self._under_way = False

    async def handle(self, what: Asked) -> dict[str, Any]:
        if not self._under_way:
            raise SyncError("online: nothing is being published: the engine's weights are not the trainer's to change")
        match what:
            case Attach(link=link):
                return await self._attach(link)
            case Load(version=version):
                if version != self._active():
                    raise SyncError(f"online: version {version} was not committed")
                return served_as_json(await self._engine.load(version))
            case CanarySample(prompt_ids=prompt, max_tokens=most):
                made = await self._engine.generate(prompt, Sampling(max_tokens=most, temperature=0.0, urgent=True))
                return {
                    "ids": made.ids,
                    "logprobs": made.logprobs,
                    "spans": [[span.version, span.count] for span in made.spans],
                    "finish_reason": made.finish_reason,
                }
            case _:
                raise NotKnown(f"online: the server process is not asked for {type(what).__name__}")

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    async def _attach(self, link: Mapping[str, Any]) -> dict[str, Any]:
        source = await asyncio.to_thread(self._open_source, link)
        before, self._source = self._source, source
        try:
            await self._engine.attach(source)
        finally:
            if before is not None:
                before.close()
        return dict(source.reply)


class EngineProxy:
    """Only what a publication needs of an Engine."""

    def __init__(self, ask: Ask, receivers: int) -> None:
        self._ask, self._receivers, self._version = ask, receivers, -1

    @property
    def version(self) -> int:
        return self._version

    @property
    def receivers(self) -> int:
        return self._receivers

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        if sampling.temperature or on_token is not None:
            raise EngineError("online: the trainer process samples canaries only, greedily")
        told = await self._ask(CanarySample(list(prompt_ids), sampling.max_tokens))
        spans = [Span(int(version), int(count)) for version, count in told["spans"]]
        return Completion(told["ids"], told["logprobs"], spans, told["finish_reason"])

    async def attach(self, source: WeightSource) -> None:
        source.attached(await self._ask(Attach(dict(source.link))))

    async def load(self, version: int) -> Served:
        served = served_of(await self._ask(Load(version)))
        self._version = served.version
        return served

    async def sleep(self) -> None:
        """The two share no memory: nothing is lent."""

    async def wake(self) -> None:
        pass

    async def lost(self) -> None:
        raise EngineError("online: the trainer process ends when it loses the server process")

    async def close(self) -> None:
        pass
