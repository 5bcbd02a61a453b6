"""The server process's will: takes jobs from the store to the trainer process, and what passed from there into the
engine.

consumes: jobs, oldest first; wishes for another version    waits for: the trainer process, the engine's flips
produces: versions that are served, each committed before   the trainer process again, whenever it dies

One task does all of it, one thing at a time; the engine answers meanwhile, and so does `status`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tandem.errors import (
    CheckpointDamaged,
    CheckpointError,
    Conflict,
    EngineError,
    EngineLost,
    SpecError,
    StoreFull,
    SyncError,
    TandemError,
)
from tandem.online import messages
from tandem.online.engine_supervisor import EngineSupervisor, Revive
from tandem.online.events import Events
from tandem.online.job_store import ENDED, Job, JobStore
from tandem.online.messages import Activate, Asked, Cancel, Checkpoint, JobProgress, Open, Publish
from tandem.online.ordinary_prompts import OrdinaryPrompts
from tandem.online.pending_requests import PendingRequests
from tandem.online.publishing import Publishing, RelayedSource
from tandem.online.regression_watch import Regression, RegressionWatch
from tandem.online.rpc import PeerLost
from tandem.online.sample_replay import ReplayMemory
from tandem.online.self_distillation import answered
from tandem.online.trainer_supervisor import TrainerProcess, TrainerSupervisor
from tandem.protocols import DigestedEngine
from tandem.spec.online import OnlineSpec

_log = logging.getLogger(__name__)

_LAST_S, _LOOK_S, _FULL_S, _CANCEL_S = 2.2, 1.0, 2.0, 5.0

_ENDED = "online: the training loop has stopped; see the server log and restart the server."

T = TypeVar("T")


class Orchestrator:
    def __init__(
        self,
        spec: OnlineSpec,
        store: JobStore,
        engine: DigestedEngine,
        open_source: Callable[[Mapping[str, Any]], RelayedSource],
        start_trainer: Callable[[], TrainerProcess],
        versions: Path,
        memory: ReplayMemory,
        ordinary: OrdinaryPrompts,
        revive: Revive | None = None,
    ) -> None:
        """`revive`: as in EngineLife."""
        self.spec, self.store, self.engine, self.events = spec, store, engine, Events()
        self._versions, self._memory, self._ordinary = versions, memory, ordinary
        self._life = EngineSupervisor(engine, revive, spec.max_restarts, self._engine_is_lost)
        self._trainer = TrainerSupervisor(start_trainer, self._handle, spec.trainer_deadline_s, spec.max_restarts)
        self._watch = RegressionWatch(spec.watch) if spec.watch is not None else None
        self._falls = set[asyncio.Task[None]]()
        self.serving = -1
        """The last version that this engine was proven to hold."""
        self._running: Job | None = None
        self._progress: dict[str, Any] = {}
        self._wishes = PendingRequests()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._checkpointed, self._checkpoint_at = -1, time.monotonic()
        self._why_no_checkpoint = ""
        self._publishing = Publishing(engine, open_source, lambda: store.active)
        self._trainer_memory: dict[str, float] = {}
        self._trainer_base: dict[str, Any] = {}
        self._trained: dict[str, Any] = {}

    # --- life

    async def start(self) -> None:
        """Once the last published version is served."""
        self._task = asyncio.create_task(self._run(), name="conductor")
        self._life.start()
        serving = asyncio.create_task(self._serving())
        await asyncio.wait((self._task, serving), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            serving.cancel()
            self._task.result()
            raise TandemError("online: the conductor ended")

    async def _serving(self) -> None:
        while self.serving < 0 or self.serving != self.store.active:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._life.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._last_checkpoint()
        await self._trainer.end()
        await self.engine.close()
        self._publishing.close()
        self.store.close()

    async def _last_checkpoint(self) -> None:
        """Where there is time for it: without it, a restart has the same weights and an older optimizer. A job that is
        under way is not waited for; it is begun again."""
        busy = self._running is not None or self._trainer.is_gone
        if not self.spec.checkpoint.at_shutdown or busy or self._checkpointed == self.store.active:
            return
        try:
            await self._trainer.ask(Checkpoint(self.store.usable()), _LAST_S)
        except TandemError as error:
            _log.warning("no checkpoint at the end: %s", error)

    def why_unfit(self) -> str:
        if self.store.broken:
            return self.store.broken
        if self._life.why_lost:
            return f"the engine was lost, and is started again: {self._life.why_lost}"
        if self.serving < 0:
            return "no version is served yet"
        return "the conductor has ended" if self._task is not None and self._task.done() else ""

    def status(self) -> dict[str, Any]:
        job = self._running
        return {
            "active": self.store.active,
            "serving": self.serving,
            "trainer": self._trainer.status()
            | {"memory": self._trainer_memory, "base": self._trainer_base, "trained": self._trained},
            "engine": self._life.status(),
            "job": None if job is None else {"id": job.id, "version": job.version, **self._progress},
            "jobs": self.store.count(),
            "ordinary": self._ordinary.status(),
            "checkpointed": self._checkpointed,
            "why_no_checkpoint": self._why_no_checkpoint,
        }

    # --- wishes

    def wake(self) -> None:
        self._news.set()

    async def cancel(self, id: str, who: str) -> dict[str, Any]:
        """A job that waits is cancelled; one that is trained ends after the step at hand."""
        state = await self.store.cancel(id, who)
        if state == "running":
            await self._call_off(id)
            return {"id": id, "state": "cancelling"}
        if state == "cancelled":
            self._say(id)
            return {"id": id, "state": state}
        raise Conflict(f"job '{id}' is {state}, and cannot be cancelled any more")

    async def activate(self, version: int, who: str, why: str = "") -> dict[str, Any]:
        """Serves a version that was published before; jobs then go on from there. One that is trained now gives way,
        and is begun again."""
        self._must_be_kept(version)
        return await self._when_idle(lambda: self._activate(version, who, why), first=version != self.store.active)

    async def checkpoint(self) -> dict[str, Any]:
        """Master and optimizer of what is served, on the disk when this returns."""
        return await self._when_idle(self._checkpoint)

    def feedback(self, metric: str, version: int, value: float) -> bool:
        """What an answer of this version was worth; whether anybody watches that. A fall brings the version before
        back."""
        watch, spec = self._watch, self.spec.watch
        if watch is None or spec is None or spec.metric != metric:
            return False
        fall = watch.add(version, value)
        parent = None if fall is None else self.store.version(fall.version)["parent"]
        if fall is not None and parent is not None:
            falling = asyncio.create_task(self._take_back_fallen(fall, int(parent)), name="a fall")
            self._falls.add(falling)
            falling.add_done_callback(self._falls.discard)
        return True

    async def _take_back_fallen(self, fall: Regression, parent: int) -> None:
        async def work() -> dict[str, Any]:
            if fall.version not in self.store.line(self.store.active):  # another rollback came first
                _log.warning("version %d fell, and is served no more: %s", fall.version, fall.text)
                return {}
            told = await self._activate(parent, "watch", fall.text, fell=True)  # what was made of it goes with it
            _log.warning("version %d was taken back: %s", fall.version, fall.text)
            return told

        try:
            await self._when_idle(work, first=True)
        except TandemError as error:
            _log.error("version %d could not be taken back: %s", fall.version, error)

    async def _when_idle(self, work: Callable[[], Awaitable[T]], *, first: bool = False) -> T:
        """`first`: a job that is trained now gives way to it."""
        if self._task is not None and self._task.done():
            raise EngineError(f"{_ENDED} {self._trainer.why_none}")
        done = self._wishes.put(work)
        self.wake()
        if first and self._running is not None:
            await self._call_off(self._running.id)
        return await done

    async def _call_off(self, id: str) -> None:
        with suppress(PeerLost):  # one that died, or hangs: the job is looked at when another one has started
            await self._trainer.ask(Cancel(id), _CANCEL_S)

    # --- the one task

    async def _run(self) -> None:
        try:
            await self._go_on()
        finally:
            self._wishes.refuse(f"{_ENDED} {self._trainer.why_none}")

    async def _go_on(self) -> None:
        while True:
            try:
                await self._once()
            except StoreFull as error:
                _log.error("%s", error)
                await self._trainer.end()  # what it trained was not committed
                await asyncio.sleep(_FULL_S)
            except TandemError as error:
                if isinstance(error, SpecError) and self.serving < 0:
                    raise
                if self._life.is_to_blame(error) and not isinstance(error, PeerLost):
                    await self._without_engine(error)
                else:
                    await self._lost(error)
            except Exception as error:  # noqa: BLE001 - of one job: all others are still to be learned
                _log.exception("what the conductor did failed")
                await self._lost(TandemError(f"online: {type(error).__name__}: {error}"))
            if not self._wishes and not self.store.jobs(1, ["queued"]) and not self._trainer.is_gone:
                self._news.clear()
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await self._news.wait()
                except TimeoutError:
                    pass

    async def _once(self) -> None:
        await self._ensure_trainer()
        await self._life.ensure()
        await self._queue_again()
        await self._ensure_served()
        await self._wishes.grant()
        if waiting := self.store.jobs(1, ["queued"]):
            self._running = waiting[0]  # from here on a wish calls it off
            await self._do(await self.store.begin(waiting[0].id))
            self._trainer.did_well()
        elif self._checkpoint_due():
            await self._checkpoint_if_it_can_be()

    # --- the engine

    def _engine_is_lost(self) -> None:
        self.serving = -1
        self.wake()

    async def _without_engine(self, error: TandemError) -> None:
        """The trainer process lives, and no job is to blame."""
        for job in self.store.jobs(2, ["running"]):
            await self.store.again(job.id, f"the engine was lost: {error}", counts=False)
            self._say(job.id)
        self._running, self._progress = None, {}
        await self._life.lost(error)

    # --- the trainer process

    async def _ensure_trainer(self) -> None:
        if not self._trainer.is_gone:
            return
        known = self.store.usable()
        asked = Open(self.spec.model_dump(mode="json"), str(self._versions), max(self.store.active, 0), known)
        opened = await self._trainer.begin(asked, self.spec.engine.start_deadline_s)
        self._trained = opened.trained
        if not known:
            await self.store.first(opened.version, opened.digest)
        else:
            await self._check_opened(opened)
        if opened.exact:
            self._checkpointed = opened.version

    async def _check_opened(self, opened: messages.WorkerOpened) -> None:
        active = self.store.active
        if opened.version != active:
            why = "; ".join(opened.damaged) or "its files are gone"
            await self.store.mark([active], "damaged", why)
            await self.store.activate(opened.version, "server", f"version {active} is damaged: {why}")
            for job in self.store.jobs(2, ["publishing"]):
                if job.version != opened.version:  # it was committed, and never served
                    await self.store.end(job.id, "failed", f"its version {job.version} is damaged: {why}")
                    self._say(job.id)
        row = self.store.version(opened.version)
        if row["digest"] != opened.digest:
            raise EngineError(
                f"online: version {opened.version} on the disk has digest {opened.digest}, and had {row['digest']}"
            )

    async def _lost(self, error: TandemError) -> None:
        await self._trainer.lost(error)
        self._running, self._progress = None, {}  # only now: until it has ended, it is asked for nothing else
        await self._trainer.pause()

    async def _queue_again(self) -> None:
        """Jobs that a trainer process, or a whole server, died over: nothing of them is left anywhere."""
        why = self._trainer.why_lost[:2000]
        for job in self.store.jobs(2, ["running"]):
            if job.attempt >= self.spec.train.attempts:
                failed = f"it was begun {job.attempt} times, and never ended; the last time: {why}"
                await self.store.end(job.id, "failed", failed)
            else:
                await self.store.again(job.id, f"attempt {job.attempt}: {why or 'the server ended'}")
            self._say(job.id)

    # --- jobs

    async def _do(self, job: Job) -> None:
        self._running, self._progress = job, {"step": 0, "steps": job.teaching.steps}
        self._say(job.id)
        groups = self.store.groups(job.id)
        replayed, rounds = self._memory.draw(job, groups)
        drawn = await self._ordinary.drawn(self.engine)
        held = await self._ordinary.held(self.engine) if job.teaching.algorithm == "sft" else []
        taught = await answered(self.engine, groups) if job.teaching.algorithm == "self_distill" else groups
        asked = messages.Train(
            job.id, job.version or 0, job.parent or 0, taught, replayed, rounds, held, drawn, job.teaching
        )
        trained = await self._trainer.train(asked)
        result = msgspec.to_builtins(trained)
        if trained.outcome == "cancelled":
            await self.store.again(job.id, "it gave way to another version", counts=False)
        elif trained.outcome != "passed":
            await self.store.end(job.id, trained.outcome, trained.why, result)  # pyright: ignore[reportArgumentType]
        elif await self.store.commit(job, trained.digest, trained.bytes, result):
            self._say(job.id)
            await self._ensure_served()
        else:
            await self._trainer.ask(messages.Settle(job.version or 0, False))
        self._running, self._progress = None, {}
        self._say(job.id)

    # --- versions

    async def _ensure_served(self) -> None:
        """The engine holds the active version, and a job that was being published is published."""
        active = self.store.active
        publishing = self.store.jobs(2, ["publishing"])
        if self.serving != active:
            try:
                await self._publish(active)
            except TandemError as error:
                if isinstance(error, EngineLost) or not publishing:  # HalfLost is one, too
                    raise
                await self._take_back(publishing[0], str(error))
                return
        for job in publishing:
            settled = await self._trainer.ask(messages.Settle(job.version or 0, True))
            self._trainer_memory = settled["memory"]
            await self.store.end(job.id, "published")
            self._memory.remember(self.store.job(job.id), self.store.groups(job.id))
            self._say(job.id)
            if settled["anchor_due"]:
                await self._checkpoint_if_it_can_be()

    async def _publish(self, version: int) -> None:
        with self._publishing.under_way():
            proof = await self._trainer.ask(Publish(version), self.spec.publish_deadline_s)
        self._trainer_base = proof["base"]
        served = self.store.version(version)["served_digest"]
        if served and served != proof["digest"]:
            raise SyncError(f"online: version {version} is served with digest {proof['digest']}, and was {served}")
        await self.store.served(version, proof["digest"])
        self.serving = version
        self._life.served()
        if self._watch is not None:
            self._watch.activated(version)
        self.events.put("version", {"version": version, "digest": proof["digest"], "seconds": proof["seconds"]})

    async def _take_back(self, job: Job, why: str) -> None:
        """The engine refused what was committed: the version before goes on."""
        _log.error("version %s is taken back: it could not be published: %s", job.version, why)
        await self.store.refused(job, f"it could not be published: {why}")
        await self._trainer.ask(messages.Settle(job.version or 0, False))
        self._say(job.id)
        await self._serve_again()

    async def _activate(self, version: int, who: str, why: str, *, fell: bool = False) -> dict[str, Any]:
        started = time.perf_counter()
        self._must_be_kept(version)
        if version != self.store.active:
            try:
                self._trainer_memory = (await self._trainer.ask(Activate(version)))["memory"]
            except CheckpointDamaged as error:
                await self.store.mark([version], "damaged", str(error))
                raise Conflict(f"version {version} is damaged, and cannot be served: {error}") from error
            except CheckpointError as error:  # whole, and of another format
                raise Conflict(f"version {version} cannot be served: {error}") from error
            try:
                before = await self.store.activate(version, who, why)
            except TandemError:
                await self._trainer.end()  # it is there already, and jobs do not go on from there
                raise
            if fell and self._watch is not None:
                self._watch.activated(version, fell=True)
            try:
                await self._ensure_served()
            except (EngineLost, StoreFull):
                raise
            except TandemError as error:
                await self._activate_again(before, f"version {version} could not be served: {error}")
                raise
        return {"version": version, "seconds": time.perf_counter() - started}

    async def _activate_again(self, version: int, why: str) -> None:
        _log.error("%s", why)
        await self._trainer.ask(Activate(version))
        await self.store.activate(version, "server", why)
        await self._serve_again()

    async def _serve_again(self) -> None:
        """The canary is asked after the flip: the engine may hold what it refused."""
        if self.engine.version != self.store.active:
            await self._publish(self.store.active)

    def _must_be_kept(self, version: int) -> None:
        if (state := self.store.version(version)["state"]) != "kept":
            raise Conflict(f"version {version} is {state}, and cannot be served")

    async def _checkpoint_if_it_can_be(self) -> None:
        """Write a checkpoint in the background; one that fails, on a full disk say, is logged and tried again later."""
        try:
            await self._checkpoint()
        except PeerLost:
            raise
        except TandemError as error:
            self._checkpoint_at, self._why_no_checkpoint = time.monotonic(), str(error)
            _log.error("no checkpoint: %s", error)

    async def _checkpoint(self) -> dict[str, Any]:
        usable = self.store.usable()
        keep = sorted({*usable[-self.spec.updates.keep :], max(self.store.active, 0)})
        if gone := [version for version in usable if version not in keep]:  # said first: then their files may go
            why = f"updates.keep = {self.spec.updates.keep} newer ones are kept"
            await self.store.mark(gone, "forgotten", why)
        written = msgspec.convert(await self._trainer.ask(Checkpoint(keep)), messages.UpdateWritten)
        self._checkpointed, self._checkpoint_at = written.version, time.monotonic()
        self._why_no_checkpoint = ""
        if not written.already:
            self.events.put("checkpoint", msgspec.to_builtins(written))
        return msgspec.to_builtins(written)

    def _checkpoint_due(self) -> bool:
        waited = time.monotonic() - self._checkpoint_at
        return self._checkpointed != self.store.active and waited >= self.spec.checkpoint.every_s

    # --- what the trainer process asks

    async def _handle(self, what: Asked) -> dict[str, Any]:
        match what:
            case JobProgress():
                if self._running is not None and self._running.id == what.job:
                    self._progress = {"step": what.step, "steps": what.steps, "metrics": what.metrics}
                    self.events.put("progress", {"id": what.job, **self._progress})
                return {}
            case _:
                return await self._publishing.handle(what)

    def _say(self, id: str) -> None:
        job = self.store.job(id)
        self.events.put(
            "job", {"id": id, "state": job.state, "version": job.version, "why": job.why}, ended=job.state in ENDED
        )
