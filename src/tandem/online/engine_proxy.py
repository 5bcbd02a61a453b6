"""The engine as the trainer process's Publisher sees it: it is in the server process, and asked over the socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tandem.errors import EngineError
from tandem.io.engine_messages import served_of
from tandem.online.messages import Asked, Attach, CanarySample, Load
from tandem.protocols import OnToken, WeightSource
from tandem.types import Completion, Sampling, Served, Span

Ask = Callable[[Asked], Awaitable[dict[str, Any]]]


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
