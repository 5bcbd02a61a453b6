"""Once around the circle: groups in, a new version out, the engine holding it.

consumes: groups, oldest started first     waits for: the slowest of them
produces: versions                         waits for: both ends of the bridge

Synchronous and asynchronous RL, and supervised training, are this loop and the number of slots of its store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, cast

from tandem.errors import EngineSilent, ProducerDied, SyncError, SyncTimeout, TandemError
from tandem.protocols import Engine, Producer, RolloutStore, Trainer, WeightBridge
from tandem.types import Batch, Group, Metrics, Proof

Call: TypeAlias = Callable[..., Awaitable[Any]]
"""How to call what blocks: `asyncio.to_thread`, or `on_this_thread`."""


async def run_loop(
    *,
    trainer: Trainer,
    bridge: WeightBridge,
    engine: Engine,
    store: RolloutStore,
    producers: Sequence[Producer],
    make_batch: Callable[[list[Group], int], Batch],
    groups_per_step: int,
    last_version: int,
    after_step: Callable[[Metrics], Awaitable[None]],
    after_sync: Callable[[Proof], None],
    sync_every: int = 1,
    sync_deadline_s: float = 60.0,
    call: Call = asyncio.to_thread,
) -> None:
    """Train until the trainer's version is `last_version`; the engine holds the last one when this returns."""
    after_sync(await publish(trainer, bridge, engine, sync_deadline_s, call))
    producing = [_supervised(producer, store) for producer in producers]
    held = 0
    try:
        while trainer.version < last_version:
            started = time.perf_counter()
            groups = await store.take(groups_per_step)
            held += len(groups)
            taken = time.perf_counter()
            await _answered(engine.sleep(), "sleep", sync_deadline_s)
            metrics = await call(trainer.step, make_batch(groups, trainer.version))
            trained = time.perf_counter()
            if held >= sync_every * groups_per_step or trainer.version >= last_version:
                after_sync(await publish(trainer, bridge, engine, sync_deadline_s, call))
                await store.release(held)  # after load(), not before: a slot freed early breaks max_lag by one
                held = 0
            else:
                await _answered(engine.wake(), "wake", sync_deadline_s)
            for producer in producers:
                metrics |= producer.drain_metrics()
            now = time.perf_counter()
            metrics |= {
                "time/generate_s": taken - started,
                "time/train_s": trained - taken,
                "time/sync_s": now - trained,
                "time/step_s": now - started,
            }
            await after_step(metrics)
    finally:
        for task in producing:
            task.cancel()
        await asyncio.gather(*producing, return_exceptions=True)


async def on_this_thread(function: Callable[..., Any], *args: Any) -> Any:
    """A `Call` on the event loop's own thread, where an inline engine runs too. One order of everything, and one team
    of OpenMP threads: two teams that take turns wait for each other by spinning, and halve the speed of both."""
    return function(*args)


async def publish(
    trainer: Trainer, bridge: WeightBridge, engine: Engine, deadline_s: float, call: Call = asyncio.to_thread
) -> Proof:
    """Both ends of the bridge meet; nothing is trained or sampled on a version without its proof."""
    weights = trainer.export()
    sending = asyncio.ensure_future(call(bridge.send, weights))  # first: an inline engine waits for it on this thread
    loading = asyncio.ensure_future(engine.load(weights.version))
    try:
        async with asyncio.timeout(deadline_s):
            _, proof = await asyncio.gather(sending, loading)
    except TandemError:
        raise
    except TimeoutError:
        raise SyncTimeout(
            f"sync: version {weights.version} did not reach the engine by {bridge.mode} within "
            f"sync.deadline_s = {deadline_s:g} s"
        ) from None
    finally:
        loading.cancel()  # when the other end broke, nothing will come any more
        await asyncio.gather(loading, return_exceptions=True)
    if proof.version != weights.version or engine.version != weights.version:
        raise SyncError(
            f"sync: sent version {weights.version}, the engine proves {proof.version} and serves {engine.version}"
        )
    return proof


async def _answered(call: Awaitable[None], what: str, deadline_s: float) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            await call
    except TandemError:
        raise
    except TimeoutError:
        raise EngineSilent(f"engine: no answer to {what}() within sync.deadline_s = {deadline_s:g} s") from None


def _supervised(producer: Producer, store: RolloutStore) -> asyncio.Task[None]:
    """A producer that ends, in whatever way, ends the wait for its groups with a named error."""

    async def watch() -> None:
        try:
            await producer.run()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise  # the run is over
            store.fail(_named(error))
        else:
            store.fail(ProducerDied(f"producer: {type(producer).__name__} ended before the run did"))

    task = asyncio.create_task(watch(), name=f"producer-{type(producer).__name__}")
    return task


def _named(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if isinstance(error, TandemError):
        return error
    died = ProducerDied(f"producer: {type(error).__name__}: {error}")
    died.__cause__ = error
    return died
