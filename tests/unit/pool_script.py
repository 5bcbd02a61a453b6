"""Engines of a script for a pool, and scenarios that leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tandem.engine.pool import EnginePool
from tandem.errors import EngineLost, TandemError
from tandem.protocols import OnToken
from tandem.types import Completion, Sampling, Served, Span


class Script:
    """Engine of a script. It dies, returns with nothing loaded, refuses versions, or holds its answers back."""

    receivers = 1

    def __init__(self, name: str, version: int = 1) -> None:
        self.name, self.version = name, version
        self.dead, self.alive = asyncio.Event(), asyncio.Event()
        self.alive.set()
        self.answering = asyncio.Event()
        self.answering.set()
        self.asked = self.attaches = self.loads = 0
        self.refuses: TandemError | None = None
        self.loading = asyncio.Event()
        self.loading.set()
        self.ranks: list[Any] = []
        self.gone = asyncio.Event()
        """It is not who was attached."""

    def die(self) -> None:
        self.alive.clear()
        self.dead.set()
        self.gone.set()

    def come_back(self) -> None:
        self.version = -1
        self.dead.clear()
        self.alive.set()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: Any = None, on_token: OnToken | None = None
    ) -> Completion:
        self.asked += 1
        version = self.version
        if self.gone.is_set():
            raise EngineLost(f"{self.name} was started anew")
        if on_token is not None:
            on_token(7, 0.0, version)
        await self.unless_dead(self.answering.wait())
        assert version >= 0, f"{self.name} was asked before it had a version"
        return Completion([7], [0.0], [Span(version, 1)], "stop")

    async def attach(self, source: Any) -> None:
        await self.unless_dead(asyncio.sleep(0))
        self.attaches += 1
        self.ranks.append(source.link.get("rank"))
        self.gone.clear()
        source.attached({"name": self.name})

    async def load(self, version: int) -> Served:
        self.loads += 1
        await self.unless_dead(self.loading.wait())
        if self.gone.is_set():
            raise EngineLost(f"{self.name} was started anew")
        if self.refuses is not None:
            raise self.refuses
        self.version = version
        return Served(version, {"a": f"{version}"}, (self.name,), self.loads)

    async def sleep(self) -> None:
        await self.unless_dead(asyncio.sleep(0))

    wake = sleep

    async def lost(self) -> None:
        await self.gone.wait()

    async def close(self) -> None: ...

    async def unless_dead(self, wait: Awaitable[Any]) -> None:
        waits = [asyncio.ensure_future(wait), asyncio.ensure_future(self.dead.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if self.dead.is_set():
            raise EngineLost(f"{self.name} is gone")


class Tells(Script):
    """It says itself when it is there again."""

    async def found(self) -> None:
        await self.alive.wait()


class Source:
    def __init__(self) -> None:
        self.carries, self.link = "full", {"mode": "file"}
        self.replies: list[Any] = []

    def attached(self, reply: Any) -> None:
        self.replies.append(reply["name"])


def play(scenario: Callable[[], Awaitable[Any]]) -> Any:
    """To its end, and nothing is left behind."""

    async def go() -> Any:
        result = await asyncio.wait_for(scenario(), 20)
        await asyncio.sleep(0.01)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert left == set()
        return result

    return asyncio.run(go())


def ask(pool: EnginePool, **options: Any) -> asyncio.Task[Completion]:
    return asyncio.create_task(pool.generate([1], Sampling(), **options))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def bring_up(pool: EnginePool, version: int = 1) -> Served:
    await pool.attach(Source())  # pyright: ignore
    return await pool.load(version)
