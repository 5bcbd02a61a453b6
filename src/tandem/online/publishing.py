"""The trainer process's access to the engine while a version is published: the handler in the server process
(Publishing), and the engine's proxy in the trainer process (EngineProxy)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from tandem.errors import EngineError, NotKnown, SyncError
from tandem.io.engine_messages import served_as_json, served_of
from tandem.online.messages import Attach, CanarySample, Load, RpcCall
from tandem.protocols import DigestedEngine, OnToken, WeightSource
from tandem.types import Completion, Sampling, Served, Span

RpcCaller = Callable[[RpcCall], Awaitable[dict[str, Any]]]


class RelayedSource(WeightSource, Protocol):
    """A weight source that remembers the engine's reply to `attached`, for the bridge in the trainer process."""

    @property
    def reply(self) -> Mapping[str, Any]: ...


class Publishing:
    """Serves the trainer process's requests to the engine: during a publication only, of the active version only."""

    def __init__(
        self,
        engine: DigestedEngine,
        open_source: Callable[[Mapping[str, Any]], RelayedSource],
        active: Callable[[], int],
    ) -> None:
        """`active` returns the version that was committed last."""
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

    async def handle(self, what: RpcCall) -> dict[str, Any]:
        if not self._under_way:
            raise SyncError("online: the trainer process may use the engine only while a version is published")
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
                raise NotKnown(f"online: the server process does not serve {type(what).__name__}")

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
    """The methods of Engine that a publication needs; each is a request to the server process."""

    def __init__(self, call: RpcCaller, receivers: int) -> None:
        self._call, self._receivers, self._version = call, receivers, -1

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
            raise EngineError("online: the trainer process samples canaries only: greedily, without streaming")
        reply = await self._call(CanarySample(list(prompt_ids), sampling.max_tokens))
        spans = [Span(int(version), int(count)) for version, count in reply["spans"]]
        return Completion(reply["ids"], reply["logprobs"], spans, reply["finish_reason"])

    async def attach(self, source: WeightSource) -> None:
        source.attached(await self._call(Attach(dict(source.link))))

    async def load(self, version: int) -> Served:
        served = served_of(await self._call(Load(version)))
        self._version = served.version
        return served

    async def sleep(self) -> None:
        """Does nothing: engine and trainer share no memory."""

    async def wake(self) -> None:
        pass

    async def lost(self) -> None:
        raise EngineError("online: the trainer process ends when it loses the server process")

    async def close(self) -> None:
        pass
