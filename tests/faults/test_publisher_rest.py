"""The engine sleeps before each step. If it is lost just then, the trainer does not write into shared memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_loop_ends import Engine, Trainer

from tandem.engine.pool import EnginePool
from tandem.errors import EngineLost
from tandem.publish import Publisher
from tandem.types import Sent, Served


class Lost(Engine):
    """Lost `times` times over, when it is to sleep."""

    def __init__(self, times: int) -> None:
        self.left, self.done = times, list[str]()

    async def attach(self, source: Any) -> None:
        self.done.append("attach")

    async def sleep(self) -> None:
        if self.left:
            self.left -= 1
            raise EngineLost("it was stopped")
        self.done.append("sleep")


class Bridge:
    mode, carries = "shared", "live"

    def __init__(self, storage: Any) -> None:
        self.memory = storage

    def source(self, num_receivers: int = 1) -> Any:
        return SimpleNamespace(attached=lambda reply: None, link={}, carries="live", close=lambda: None)

    def storage(self) -> Any:
        return self.memory

    def send(self, weights: Any) -> Sent:
        return Sent(weights.version, "shared", {})

    def close(self) -> None: ...


def rested(engine: Lost, *, single_copy: bool, retries: int = 1) -> list[str]:
    async def work() -> list[str]:
        trainer: Any = Trainer()
        bridge: Any = Bridge({"w": torch.zeros(1)} if single_copy else None)
        publisher = Publisher(bridge, engine, retries=retries)  # pyright: ignore[reportArgumentType]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(publisher, "_compare", lambda *_: None)
            await publisher.publish(trainer)
            await publisher.rest(trainer)
        return engine.done

    return asyncio.run(work())


def test_what_both_have_one_copy_of_is_not_written_into_before_a_lost_engine_was_taken_back() -> None:
    assert rested(Lost(1), single_copy=True) == ["attach", "attach", "sleep"]


def test_an_engine_with_weights_of_its_own_is_taken_back_with_the_next_version() -> None:
    assert rested(Lost(1), single_copy=False) == ["attach"]


def test_an_engine_that_is_lost_over_and_over_ends_the_run() -> None:
    with pytest.raises(EngineLost, match="twice in a row"):
        rested(Lost(2), single_copy=True)
    with pytest.raises(EngineLost, match="it was stopped"):
        rested(Lost(1), single_copy=True, retries=0)


class Starting(Engine):
    """It is lost when it is told to be, and takes a while to start again; what sleeps is woken by a load."""

    def __init__(self) -> None:
        self.gone, self.starts, self.awake, self.epoch = asyncio.Event(), 0, True, 0

    async def attach(self, source: Any) -> None:
        if self.starts:
            await asyncio.sleep(0.2)
        self.starts, self.awake = self.starts + 1, False
        source.attached({"boot_id": f"{self.starts}", "layout": {}})

    async def load(self, version: int) -> Served:
        await asyncio.sleep(0.1)
        self.version, self.awake, self.epoch = version, True, self.epoch + 1
        return Served(version, {}, (f"{self.starts}",), self.epoch)

    async def sleep(self) -> None:
        await asyncio.sleep(0.01)
        self.awake = False

    async def lost(self) -> None:
        await self.gone.wait()
        self.gone.clear()


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.15, 0.25, 0.32])
def test_weights_are_not_written_while_an_engine_that_is_taken_back_is_awake(after_s: float, pooled: bool) -> None:
    async def work() -> None:
        trainer: Any = Trainer()
        bridge: Any = Bridge({"w": torch.zeros(1)})
        engine: Any = Starting()
        behind: Any = EnginePool([engine]) if pooled else engine
        publisher = Publisher(bridge, behind, retries=2)
        await publisher.publish(trainer)
        keeping = asyncio.create_task(publisher.watch(trainer))
        await asyncio.sleep(0.02)
        engine.gone.set()
        await asyncio.sleep(after_s)
        async with publisher.resting(trainer):
            for _ in range(10):
                assert not engine.awake
                await asyncio.sleep(0.05)
        keeping.cancel()
        await behind.close()

    asyncio.run(work())
