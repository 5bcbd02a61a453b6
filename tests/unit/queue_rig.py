"""Test rig: a rollout queue with a clock that the test sets, and small groups."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tandem.rollout.queue.queue import RolloutQueue
from tandem.rollout.queue.types import Lease, QueueLimits, RegisteredEnvironment, TrainerSpec
from tandem.rollout.wire import codec
from tandem.types import Trajectory

RUN = TrainerSpec("run", groups_per_step=2, max_lag=1)


def group(version: int = 0, *, name: str = "", size: int = 2, tokens: int = 4, **head: Any) -> codec.WireGroup:
    one = Trajectory(
        ids=list(range(tokens)),
        trained=[False] + [True] * (tokens - 1),
        logprobs=[0.0] + [-0.5] * (tokens - 1),
        versions=[-1] + [version] * (tokens - 1),
        task_id=name,
    )
    return codec.encode([dataclasses.replace(one, reward=float(k)) for k in range(size)], **head)


def names(lease: Lease | None) -> list[str]:
    assert lease is not None
    return [codec.decode(each.frame)[0].task_id for each in lease.groups]


class Rig:
    def __init__(self, directory: Path, **limits: Any) -> None:
        self.directory, self.now = directory, 100.0
        self.limits = QueueLimits(**({"reserve_bytes": 0} | limits))
        self.queue = self.open()
        self.epoch, self.environments = 0, {}

    def open(self) -> RolloutQueue:
        return RolloutQueue(self.directory, self.limits, clock=lambda: self.now)

    async def begin(self, spec: TrainerSpec = RUN, **environments: Any) -> None:
        self.epoch = (await self.queue.registration.register_trainer(spec)).epoch
        for name, options in (environments or {"a": {}}).items():
            handle = await self.queue.registration.register_environment(RegisteredEnvironment(name, **options))
            self.environments[name] = handle.id

    async def restart(self) -> None:
        """Close and reopen the queue: only the disk is left, as after a kill."""
        await self.queue.close()
        self.queue = self.open()

    async def put(self, name: str = "", version: int = 0, *, by: str = "a", **options: Any) -> Any:
        once = options.pop("once", None)
        made = group(version, name=name, environment=self.environments[by], **options)
        return (await self.queue.environments.put([made], once=once))[0]

    async def admit(self, count: int = 1, *, by: str = "a", **options: Any) -> list[int]:
        return [ticket.order for ticket in await self.queue.environments.admit(self.environments[by], count, **options)]

    async def take(self, count: int = 0, **options: Any) -> Lease | None:
        return await self.queue.trainer.take(self.epoch, count, **options)


def rigged(directory: Path, scenario: Callable[[Rig], Awaitable[None]], **limits: Any) -> None:
    async def whole() -> None:
        rig = Rig(directory, **limits)
        try:
            async with asyncio.timeout(10):
                await scenario(rig)
        finally:
            await rig.queue.close()

    asyncio.run(whole())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
