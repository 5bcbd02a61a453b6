"""The training loop: take groups, train a step, publish the new version to the engine.

consumes: groups, oldest started first     waits for: the slowest of them
produces: versions                         waits for: both ends of the bridge

Synchronous RL, asynchronous RL and supervised training all run this loop; they differ in the store's number of slots.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, cast

from tandem.errors import ProducerDied, TandemError
from tandem.protocols import Producer, RolloutStore, Stateful, Trainer
from tandem.publish import Call, Publisher
from tandem.types import Batch, Group, Metrics


class Checkpointer(Protocol):
    """Saves the run's state, so that another process can resume it."""

    def begin(self, trainer: Trainer, parts: Mapping[str, Stateful], last_version: int) -> None:
        """Restore the parts from the checkpoint that the run resumes from, if there is one."""
        ...

    def step_started(self) -> None:
        """Note that the trainer is about to change: the last mark no longer matches it."""
        ...

    def mark(self) -> None:
        """Copy the state of all parts. Called between two steps, when nothing of the next step has begun."""
        ...

    async def save_if_due(self, groups: Sequence[Group], metrics: Metrics) -> Sequence[Group]:
        """Save the last mark if a checkpoint is due. Return the groups that no longer need to be stored elsewhere."""
        ...


class NoCheckpoints:
    """Saves nothing: such a run cannot be resumed."""

    def begin(self, trainer: Trainer, parts: Mapping[str, Stateful], last_version: int) -> None:
        pass

    def step_started(self) -> None:
        pass

    def mark(self) -> None:
        pass

    async def save_if_due(self, groups: Sequence[Group], metrics: Metrics) -> Sequence[Group]:
        return groups


_NO_CHECKPOINTS = NoCheckpoints()


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
    checkpointer: Checkpointer = _NO_CHECKPOINTS,
    look_over: Callable[[Sequence[Group]], Awaitable[None]] | None = None,
    max_lag: float = math.inf,
) -> None:
    """Train until the trainer's version is `last_version`; the engine holds that version when this returns.
    `look_over`: awaited with the groups of each step before they are packed; a served teacher scores them then.
    `max_lag`: an older token ends the run. Infinite where posts from outside decide what is trained on."""
    named_producers = {f"producer-{number}": each for number, each in enumerate(producers)}
    checkpointer.begin(trainer, {"store": store, "publisher": publisher, **named_producers}, last_version)
    await publisher.ensure_served(trainer)
    if trainer.version >= last_version:
        return  # the run was resumed from a checkpoint of its last step
    working = [_supervised(producer.run(), type(producer).__name__, store) for producer in producers]
    working.append(_supervised(publisher.watch(trainer), "publisher", store))
    held = 0
    try:
        while trainer.version < last_version:
            started = time.perf_counter()
            groups = await store.take(groups_per_step)
            held += len(groups)
            if look_over is not None:
                await look_over(groups)
            taken = time.perf_counter()
            publisher.check(groups, trainer.version - max_lag)
            checkpointer.step_started()
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
            checkpointer.mark()
            now = time.perf_counter()
            metrics |= {
                "time/generate_s": taken - started,
                "time/train_s": trained - taken,
                "time/sync_s": now - trained,
                "time/step_s": now - started,
            }
            await after_step(metrics)
            if synced:
                # After load(), not before: a slot freed early breaks max_lag by one. And after the evaluation in
                # after_step(): else on-policy groups would share the engine's batches with it, and a resumed run, which
                # does not repeat that evaluation, would sample other tokens.
                await store.release(held)
                held = 0
            if contained := await checkpointer.save_if_due(groups, metrics):
                await store.ack(contained)
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


def _supervised(work: Coroutine[Any, Any, None], name: str, store: RolloutStore) -> asyncio.Task[None]:
    """Run this work as a task. If it ends before the run does, calls that wait for groups get a named error."""

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
