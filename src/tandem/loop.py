"""Once around the circle: groups in, a new version out, the engine holding it.

consumes: groups, oldest started first     waits for: the slowest of them
produces: versions                         waits for: both ends of the bridge

Synchronous and asynchronous RL, and supervised training, are this loop and the number of slots of its store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, cast

from tandem.errors import ProducerDied, TandemError
from tandem.protocols import Producer, RolloutStore, Stateful, Trainer
from tandem.publish import Call, Publisher
from tandem.types import Batch, Group, Metrics


class Checkpointer(Protocol):
    """Remembers where the run is, so that another process can go on from there."""

    def begin(self, trainer: Trainer, parts: Mapping[str, Stateful], last_version: int) -> None:
        """Gives the parts what they held then."""
        ...

    def stepping(self) -> None:
        """From here on, the last mark is not what the trainer is."""
        ...

    def mark(self) -> None:
        """A step has ended, and nothing of the next has begun."""
        ...

    async def keep(self, groups: Sequence[Group], metrics: Metrics) -> Sequence[Group]:
        """Saves the mark where that is due; what may be forgotten elsewhere."""
        ...


class NoCheckpoints:
    def begin(self, trainer: Trainer, parts: Mapping[str, Stateful], last_version: int) -> None:
        pass

    def stepping(self) -> None:
        pass

    def mark(self) -> None:
        pass

    async def keep(self, groups: Sequence[Group], metrics: Metrics) -> Sequence[Group]:
        return groups


_FORGETFUL = NoCheckpoints()


async def run_loop(
    *,
    trainer: Trainer,
    publisher: Publisher,
    store: RolloutStore,
    producers: Sequence[Producer],
    make_batch: Callable[[list[Group], int], Batch],
    groups_per_step: int,
    last_version: int,
    after_step: Callable[[Metrics], Awaitable[None]],
    sync_every: int = 1,
    call: Call = asyncio.to_thread,
    keeper: Checkpointer = _FORGETFUL,
) -> None:
    """Train until the trainer's version is `last_version`; the engine holds the last one when this returns."""
    made_by = {f"producer-{number}": each for number, each in enumerate(producers)}
    keeper.begin(trainer, {"store": store, "publisher": publisher, **made_by}, last_version)
    await publisher.hold(trainer)
    if trainer.version >= last_version:
        return  # it went on from a checkpoint of its last step
    working = [_supervised(producer.run(), type(producer).__name__, store) for producer in producers]
    working.append(_supervised(publisher.keep(trainer), "publisher", store))
    held = 0
    try:
        while trainer.version < last_version:
            started = time.perf_counter()
            groups = await store.take(groups_per_step)
            held += len(groups)
            taken = time.perf_counter()
            publisher.check(groups)
            keeper.stepping()
            async with publisher.resting(trainer):
                metrics = await call(trainer.step, make_batch(groups, trainer.version))
            trained = time.perf_counter()
            synced = held >= sync_every * groups_per_step or trainer.version >= last_version
            if synced:
                await publisher.publish(trainer)
            else:
                await publisher.go_on()
            for producer in producers:
                metrics |= producer.drain_metrics()
            keeper.mark()
            now = time.perf_counter()
            metrics |= {
                "time/generate_s": taken - started,
                "time/train_s": trained - taken,
                "time/sync_s": now - trained,
                "time/step_s": now - started,
            }
            await after_step(metrics)
            if synced:
                # After load(), not before: a slot freed early breaks max_lag by one. And after an evaluation: on-policy
                # groups share the engine's batches with nothing, whether it is made here or was before a resume.
                await store.release(held)
                held = 0
            if contained := await keeper.keep(groups, metrics):
                await store.ack(contained)
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


def _supervised(work: Coroutine[Any, Any, None], name: str, store: RolloutStore) -> asyncio.Task[None]:
    """Work that ends, in whatever way, ends the wait for groups with a named error."""

    async def watch() -> None:
        try:
            await work
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise  # the run is over
            store.fail(_named(error))
        else:
            store.fail(ProducerDied(f"producer: {name} ended before the run did"))

    task = asyncio.create_task(watch(), name=f"producer-{name}")
    return task


def _named(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if isinstance(error, TandemError):
        return error
    died = ProducerDied(f"producer: {type(error).__name__}: {error}")
    died.__cause__ = error
    return died
