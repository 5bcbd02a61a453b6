"""Several engines that are one Engine: requests go to the least busy, versions to all of them.

An engine that is lost is left out, and its requests are asked again elsewhere; when it was the only one, they wait
until it, or another, was taken back by `attach` and `load`. Sampling is a function of prompt, weights and seed, so
asking again does no harm; whoever listens token by token then hears the new ones after the old.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tandem.errors import EngineLost, SyncError, TandemError
from tandem.protocols import Engine, OnToken, WeightSource
from tandem.types import Completion, Sampling, Served, WeightKind, Weights

_log = logging.getLogger(__name__)
_SESSIONS_KEPT = 100_000
_TRY_AGAIN_S = 30.0  # after this, an engine that was left out is looked for at the next `attach`


class EnginePool:
    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._busy = [0] * len(self._engines)
        self._out: dict[int, float] = {}
        self._home: dict[str, int] = {}
        self._back, self._went = asyncio.Event(), asyncio.Event()

    @property
    def version(self) -> int:
        """The oldest that any of them serves."""
        return min(engine.version for engine in self._in() or self._engines)

    @property
    def receivers(self) -> int:
        return sum(self._engines[index].receivers for index in self._candidates())

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        while True:
            index = await self._pick(session)
            self._busy[index] += 1
            try:
                return await self._engines[index].generate(prompt_ids, sampling, session=session, on_token=on_token)
            except EngineLost as error:
                self._leave_out(index, error)
            finally:
                self._busy[index] -= 1

    async def attach(self, source: WeightSource) -> None:
        """All that `receivers` counted, or an error; those that failed are then not counted for a while."""
        rank, candidates, errors = 0, self._candidates(), list[TandemError]()
        for index in candidates:
            engine = self._engines[index]
            try:
                await engine.attach(_Rank(source, rank))
                self._out.pop(index, None)
            except TandemError as error:
                errors.append(error)
                self._leave_out(index, error)
            rank += engine.receivers
        if errors:
            raise errors[0]

    async def load(self, version: int) -> Served:
        there = [index for index in range(len(self._engines)) if index not in self._out]
        loads = await asyncio.gather(*(self._engines[index].load(version) for index in there), return_exceptions=True)
        served: list[Served] = []
        for index, load in zip(there, loads, strict=True):
            if isinstance(load, EngineLost):
                self._leave_out(index, load)
            elif isinstance(load, BaseException):
                raise load  # not sooner: an engine that still waits would take what is sent next
            else:
                served.append(load)
        if not served:
            raise EngineLost("pool: no engine is left")
        for other in served[1:]:
            if (other.version, other.fingerprints) != (served[0].version, served[0].fingerprints):
                raise SyncError(f"pool: asked for version {version}, and the engines hold different weights")
        self._back.set()
        return _merged(served)

    async def sleep(self) -> None:
        await self._all(lambda engine: engine.sleep())

    async def wake(self) -> None:
        await self._all(lambda engine: engine.wake())

    async def lost(self) -> None:
        """Returns once any of them is."""
        watching: list[asyncio.Future[Any]] = [asyncio.ensure_future(engine.lost()) for engine in self._in()]
        watching.append(asyncio.ensure_future(self._went.wait()))
        try:
            await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watching:
                watch.cancel()
        self._went.clear()

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))

    # --- who is in

    def _candidates(self) -> list[int]:
        """Those that are in, and those whose turn to be tried again has come; all, if there would be none."""
        now = time.monotonic()
        ready = [i for i in range(len(self._engines)) if i not in self._out or now - self._out[i] > _TRY_AGAIN_S]
        return ready or list(range(len(self._engines)))

    def _in(self) -> list[Engine]:
        return [engine for index, engine in enumerate(self._engines) if index not in self._out]

    async def _pick(self, session: str | None) -> int:
        """A session stays where its prefix is cached; everything else goes to the least busy."""
        while len(self._out) == len(self._engines):
            self._back.clear()
            await self._back.wait()
        home = self._home.get(session, -1) if session else -1
        if home in self._out or home < 0:
            there = (index for index in range(len(self._engines)) if index not in self._out)
            home = min(there, key=self._busy.__getitem__)
        if session:
            self._home.pop(session, None)
            self._home[session] = home  # last in: the ones not asked for longest are forgotten first
            if len(self._home) > _SESSIONS_KEPT:
                del self._home[next(iter(self._home))]
        return home

    def _leave_out(self, index: int, error: BaseException) -> None:
        if index not in self._out:
            _log.warning("pool: engine %d of %d is left out: %s", index + 1, len(self._engines), error)
            self._out[index] = time.monotonic()
            self._went.set()

    async def _all(self, ask: Callable[[Engine], Any]) -> None:
        there = [index for index in range(len(self._engines)) if index not in self._out]
        answers = await asyncio.gather(*(ask(self._engines[index]) for index in there), return_exceptions=True)
        for index, answer in zip(there, answers, strict=True):
            if isinstance(answer, EngineLost) and len(there) > 1:
                self._leave_out(index, answer)
            elif isinstance(answer, BaseException):
                raise answer


def _merged(served: Sequence[Served]) -> Served:
    phases = dict.fromkeys(name for each in served for name in each.seconds)
    return Served(
        served[0].version,
        served[0].fingerprints,
        tuple(name for each in served for name in each.engines),
        min(each.cache_epoch for each in served),
        {name: max(each.seconds.get(name, 0.0) for each in served) for name in phases},
    )


class _Rank:
    """One engine's share of a source that expects several receivers."""

    def __init__(self, source: WeightSource, rank: int) -> None:
        self._source, self._rank = source, rank

    @property
    def carries(self) -> WeightKind:
        return self._source.carries

    @property
    def link(self) -> Mapping[str, Any]:
        return {**self._source.link, "rank": self._rank} if self._source.link else {}

    def house(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        return self._source.house(tensors)

    def attached(self, reply: Mapping[str, Any]) -> None:
        self._source.attached(reply)

    def receive(self, version: int, rank: int = 0) -> Weights:
        return self._source.receive(version, self._rank + rank)

    def close(self) -> None:
        self._source.close()
