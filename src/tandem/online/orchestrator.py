"""The main loop of the server process: give jobs to the trainer process, commit the versions that pass the gates, and
have them published to the engine.

consumes: jobs, oldest first; requests for a version        waits for: the trainer process; the engine's weight updates
produces: served versions, each committed before            restarts the trainer process and the engine when they die

One task does all of this, one thing at a time. Meanwhile the engine serves requests, and `status` works.
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
from tandem.online.engine_supervisor import EngineSupervisor, Restart
from tandem.online.events import Events
from tandem.online.job_store import ENDED, JobStore, LearningJob
from tandem.online.messages import Activate, Cancel, Checkpoint, JobProgress, Open, Publish, RpcCall
from tandem.online.ordinary_prompts import OrdinaryPrompts
from tandem.online.pending_requests import PendingRequests
from tandem.online.publishing import Publishing, RelayedSource
from tandem.online.regression_watch import Regression, RegressionWatch
from tandem.online.rpc import ConnectionLost
from tandem.online.sample_replay import ReplayMemory
from tandem.online.self_distillation import sample_answers
from tandem.online.trainer_supervisor import TrainerProcess, TrainerSupervisor
from tandem.protocols import DigestedEngine
from tandem.spec.online import OnlineSpec

_log = logging.getLogger(__name__)

_SHUTDOWN_S, _POLL_S, _DISK_FULL_S, _CANCEL_S = 2.2, 1.0, 2.0, 5.0

_STOPPED = "online: the training loop has stopped; see the server log and restart the server."

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
        restart_engine: Restart | None = None,
    ) -> None:
        """`restart_engine`: as in EngineSupervisor."""
        self.spec, self.store, self.engine, self.events = spec, store, engine, Events()
        self._versions, self._memory, self._ordinary = versions, memory, ordinary
        self._engine_supervisor = EngineSupervisor(engine, restart_engine, spec.max_restarts, self._on_engine_lost)
        self.trainer = TrainerSupervisor(start_trainer, self._handle, spec.trainer_deadline_s, spec.max_restarts)
        self._watch = RegressionWatch(spec.watch) if spec.watch is not None else None
        self._rollbacks = set[asyncio.Task[None]]()
        self.serving = -1
        """The last version that the engine was proven to serve; -1: none since its last start."""
        self._running: LearningJob | None = None
        self._progress: dict[str, Any] = {}
        self._requests = PendingRequests()
        self._work_arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._checkpointed, self._checkpoint_at = -1, time.monotonic()
        self._why_no_checkpoint = ""
        self._publishing = Publishing(engine, open_source, lambda: store.active)
        self._trainer_memory: dict[str, float] = {}
        self._trainer_base: dict[str, Any] = {}
        self._trained_parts: dict[str, Any] = {}

    # --- start and end

    async def start(self) -> None:
        """Start both supervisors; return once the active version is served."""
        self._task = asyncio.create_task(self._run(), name="orchestrator")
        self._engine_supervisor.start()
        serving = asyncio.create_task(self._serving())
        await asyncio.wait((self._task, serving), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            serving.cancel()
            self._task.result()
            raise TandemError(_STOPPED)

    async def _serving(self) -> None:
        while self.serving < 0 or self.serving != self.store.active:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._engine_supervisor.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._last_checkpoint()
        await self.trainer.end()
        await self.engine.close()
        self._publishing.close()
        self.store.close()

    async def _last_checkpoint(self) -> None:
        """Write a checkpoint if the trainer is idle and _SHUTDOWN_S is enough. Without one, a restart has the same
        weights and an older optimizer state. A running job is not waited for: a restart trains it again."""
        busy = self._running is not None or self.trainer.is_gone
        if not self.spec.checkpoint.at_shutdown or busy or self._checkpointed == self.store.active:
            return
        try:
            await self.trainer.call(Checkpoint(self.store.usable()), _SHUTDOWN_S)
        except TandemError as error:
            _log.warning("no checkpoint at the end: %s", error)

    def why_unfit(self) -> str:
        """Return why the server is not ready; empty if it is."""
        if self.store.broken:
            return self.store.broken
        if self._engine_supervisor.why_lost:
            return f"the engine was lost, and is being restarted: {self._engine_supervisor.why_lost}"
        if self.serving < 0:
            return "no version is served yet"
        return "the training loop has ended" if self._task is not None and self._task.done() else ""

    def status(self) -> dict[str, Any]:
        job = self._running
        return {
            "active": self.store.active,
            "serving": self.serving,
            "trainer": self.trainer.status()
            | {"memory": self._trainer_memory, "base": self._trainer_base, "trained": self._trained_parts},
            "engine": self._engine_supervisor.status(),
            "job": None if job is None else {"id": job.id, "version": job.version, **self._progress},
            "jobs": self.store.count(),
            "ordinary": self._ordinary.status(),
            "checkpointed": self._checkpointed,
            "why_no_checkpoint": self._why_no_checkpoint,
        }

    # --- requests of the routes

    def wake(self) -> None:
        """Look for work now: a job was added."""
        self._work_arrived.set()

    async def cancel(self, id: str, who: str) -> dict[str, Any]:
        """Cancel a job: a queued one at once, a running one after its current step."""
        state = await self.store.cancel(id, who)
        if state == "running":
            await self._interrupt(id)
            return {"id": id, "state": "cancelling"}
        if state == "cancelled":
            self._emit_job(id)
            return {"id": id, "state": state}
        raise Conflict(f"job '{id}' is {state}: only a queued or running job can be cancelled")

    async def activate(self, version: int, who: str, why: str = "") -> dict[str, Any]:
        """Serve a version that was published before; the next jobs train on from it. A running job is interrupted and
        queued again."""
        self._check_kept(version)
        interrupt = version != self.store.active
        return await self._between_jobs(lambda: self._activate(version, who, why), interrupt=interrupt)

    async def checkpoint(self) -> dict[str, Any]:
        """Write master weights and optimizer state of the served version; return once they are on the disk."""
        return await self._between_jobs(self._checkpoint)

    def feedback(self, metric: str, version: int, value: float) -> bool:
        """Take the rating of an answer of this version. If the metric has fallen with the version, roll back to its
        parent. Return whether the spec watches this metric."""
        watch, spec = self._watch, self.spec.watch
        if watch is None or spec is None or spec.metric != metric:
            return False
        regression = watch.add(version, value)
        parent = None if regression is None else self.store.version(regression.version)["parent"]
        if regression is not None and parent is not None:
            rollback = asyncio.create_task(self.roll_back(regression, int(parent)), name="rollback")
            self._rollbacks.add(rollback)
            rollback.add_done_callback(self._rollbacks.discard)
        return True

    async def roll_back(self, regression: Regression, parent: int) -> None:
        """Serve the parent again. Versions trained on top of the regressed one are rolled back with it."""

        async def work() -> dict[str, Any]:
            if regression.version not in self.store.lineage(self.store.active):  # another rollback came first
                _log.warning(
                    "version %d regressed, but is not served any more: %s", regression.version, regression.text
                )
                return {}
            row = await self._activate(parent, "watch", regression.text, regressed=True)
            _log.warning("version %d was rolled back: %s", regression.version, regression.text)
            return row

        try:
            await self._between_jobs(work, interrupt=True)
        except TandemError as error:
            _log.error("version %d could not be rolled back: %s", regression.version, error)

    async def _between_jobs(self, work: Callable[[], Awaitable[T]], *, interrupt: bool = False) -> T:
        """Have the main task do this work before its next job. `interrupt`: do not wait for a running job to end."""
        if self._task is not None and self._task.done():
            raise EngineError(f"{_STOPPED} {self.trainer.why_given_up}")
        done = self._requests.put(work)
        self.wake()
        if interrupt and self._running is not None:
            await self._interrupt(self._running.id)
        return await done

    async def _interrupt(self, id: str) -> None:
        with suppress(ConnectionLost):  # the process died or hangs: _requeue looks at the job after its restart
            await self.trainer.call(Cancel(id), _CANCEL_S)

    # --- the main task

    async def _run(self) -> None:
        try:
            await self._loop()
        finally:
            self._requests.refuse_all(f"{_STOPPED} {self.trainer.why_given_up}")

    async def _loop(self) -> None:
        while True:
            try:
                await self._turn()
            except StoreFull as error:
                _log.error("%s", error)
                await self.trainer.end()  # it may hold a version that was not committed
                await asyncio.sleep(_DISK_FULL_S)
            except TandemError as error:
                if isinstance(error, SpecError) and self.serving < 0:
                    raise
                if self._engine_supervisor.can_recover(error) and not isinstance(error, ConnectionLost):
                    await self._recover_engine(error)
                else:
                    await self._recover_trainer(error)
            except Exception as error:  # noqa: BLE001 - one job's failure must not stop the jobs after it
                _log.exception("a turn of the orchestrator failed")
                await self._recover_trainer(TandemError(f"online: {type(error).__name__}: {error}"))
            if not self._requests and not self.store.jobs(1, ["queued"]) and not self.trainer.is_gone:
                self._work_arrived.clear()
                try:
                    async with asyncio.timeout(_POLL_S):
                        await self._work_arrived.wait()
                except TimeoutError:
                    pass

    async def _turn(self) -> None:
        """Bring trainer, engine and store to a good state, then do the pending requests and one job."""
        await self._ensure_trainer()
        await self._engine_supervisor.ensure()
        await self._requeue()
        await self._ensure_served()
        await self._requests.run_all()
        if waiting := self.store.jobs(1, ["queued"]):
            self._running = waiting[0]  # before begin(): a request that arrives during it must interrupt this job
            await self._train_job(await self.store.begin(waiting[0].id))
            self.trainer.did_well()
        elif self.checkpoint_due():
            await self._try_checkpoint()

    # --- the engine

    def _on_engine_lost(self) -> None:
        self.serving = -1
        self.wake()

    async def _recover_engine(self, error: TandemError) -> None:
        """Queue the running job again, not counted as an attempt; the trainer process goes on."""
        for job in self.store.jobs(2, ["running"]):
            await self.store.requeue(job.id, f"the engine was lost: {error}", counts=False)
            self._emit_job(job.id)
        self._running, self._progress = None, {}
        await self._engine_supervisor.lost(error)

    # --- the trainer process

    async def _ensure_trainer(self) -> None:
        if not self.trainer.is_gone:
            return
        known = self.store.usable()
        request = Open(self.spec.model_dump(mode="json"), str(self._versions), max(self.store.active, 0), known)
        opened = await self.trainer.begin(request, self.spec.engine.start_deadline_s)
        self._trained_parts = opened.trained
        if not known:
            await self.store.first(opened.version, opened.digest)
        else:
            await self._check_opened(opened)
        if opened.exact:
            self._checkpointed = opened.version

    async def _check_opened(self, opened: messages.WorkerOpened) -> None:
        """If the active version is damaged, make the version that was loaded instead the active one."""
        active = self.store.active
        if opened.version != active:
            why = "; ".join(opened.damaged) or "its files are gone"
            await self.store.mark([active], "damaged", why)
            await self.store.activate(opened.version, "server", f"version {active} is damaged: {why}")
            for job in self.store.jobs(2, ["publishing"]):
                if job.version != opened.version:  # committed, but never served
                    await self.store.end(job.id, "failed", f"its version {job.version} is damaged: {why}")
                    self._emit_job(job.id)
        row = self.store.version(opened.version)
        if row["digest"] != opened.digest:
            raise EngineError(
                f"online: version {opened.version} on the disk has digest {opened.digest}, but {row['digest']} was "
                "committed: the files were changed"
            )

    async def _recover_trainer(self, error: TandemError) -> None:
        await self.trainer.lost(error)
        self._running, self._progress = None, {}  # only after lost(): until then `_interrupt` may still find the job
        await self.trainer.pause()

    async def _requeue(self) -> None:
        """Queue jobs again that were running when the trainer process or the server died; their versions do not exist.
        A job fails after train.attempts."""
        why = self.trainer.why_lost[:2000]
        for job in self.store.jobs(2, ["running"]):
            if job.attempt >= self.spec.train.attempts:
                failed = f"it was started {job.attempt} times and never ended; the last time: {why}"
                await self.store.end(job.id, "failed", failed)
            else:
                await self.store.requeue(job.id, f"attempt {job.attempt}: {why or 'the server ended'}")
            self._emit_job(job.id)

    # --- jobs

    async def _train_job(self, job: LearningJob) -> None:
        self._running, self._progress = job, {"step": 0, "steps": job.teaching.steps}
        self._emit_job(job.id)
        groups = self.store.groups(job.id)
        replayed, rounds = self._memory.draw(job, groups)
        drawn = await self._ordinary.drawn(self.engine)
        held = await self._ordinary.held(self.engine) if job.teaching.algorithm == "sft" else []
        if job.teaching.algorithm == "self_distill":
            groups = await sample_answers(self.engine, groups)
        request = messages.Train(
            job.id, job.version or 0, job.parent or 0, groups, replayed, rounds, held, drawn, job.teaching
        )
        trained = await self.trainer.train(request)
        result = msgspec.to_builtins(trained)
        if trained.outcome == "cancelled":  # if a client cancelled it, `requeue` ends it
            await self.store.requeue(job.id, "it was interrupted by a request for another version", counts=False)
        elif trained.outcome != "passed":
            await self.store.end(job.id, trained.outcome, trained.why, result)  # pyright: ignore[reportArgumentType]
        elif await self.store.commit(job, trained.digest, trained.bytes, result):
            self._emit_job(job.id)
            await self._ensure_served()
        else:  # cancelled at the last moment: nothing was committed
            await self.trainer.call(messages.Settle(job.version or 0, False))
        self._running, self._progress = None, {}
        self._emit_job(job.id)

    # --- versions

    async def _ensure_served(self) -> None:
        """Publish the active version unless the engine serves it; then end the job that made it as published."""
        active = self.store.active
        publishing = self.store.jobs(2, ["publishing"])
        if self.serving != active:
            try:
                await self._publish(active)
            except TandemError as error:
                if isinstance(error, EngineLost) or not publishing:  # ConnectionLost is an EngineLost, too
                    raise
                await self._revert(publishing[0], str(error))
                return
        for job in publishing:
            settled = await self.trainer.call(messages.Settle(job.version or 0, True))
            self._trainer_memory = settled["memory"]
            await self.store.end(job.id, "published")
            self._memory.remember(self.store.job(job.id), self.store.groups(job.id))
            self._emit_job(job.id)
            if settled["anchor_due"]:
                await self._try_checkpoint()

    async def _publish(self, version: int) -> None:
        with self._publishing.under_way():
            proof = await self.trainer.call(Publish(version), self.spec.publish_deadline_s)
        self._trainer_base = proof["base"]
        served = self.store.version(version)["served_digest"]
        if served and served != proof["digest"]:
            raise SyncError(
                f"online: version {version} is served with digest {proof['digest']}, but with {served} the first time"
            )
        await self.store.served(version, proof["digest"])
        self.serving = version
        self._engine_supervisor.served()
        if self._watch is not None:
            self._watch.activated(version)
        self.events.put("version", {"version": version, "digest": proof["digest"], "seconds": proof["seconds"]})

    async def _revert(self, job: LearningJob, why: str) -> None:
        """Undo the commit of a version that the engine refused; its parent is served on."""
        _log.error("version %s is reverted: it could not be published: %s", job.version, why)
        await self.store.refused(job, f"it could not be published: {why}")
        await self.trainer.call(messages.Settle(job.version or 0, False))
        self._emit_job(job.id)
        await self._restore_served()

    async def _activate(self, version: int, who: str, why: str, *, regressed: bool = False) -> dict[str, Any]:
        started = time.perf_counter()
        self._check_kept(version)
        if version != self.store.active:
            try:
                self._trainer_memory = (await self.trainer.call(Activate(version)))["memory"]
            except CheckpointDamaged as error:
                await self.store.mark([version], "damaged", str(error))
                raise Conflict(f"version {version} is damaged, and cannot be served: {error}") from error
            except CheckpointError as error:  # not damaged, but of another format
                raise Conflict(f"version {version} cannot be served: {error}") from error
            try:
                before = await self.store.activate(version, who, why)
            except TandemError:
                await self.trainer.end()  # it already holds that version, but jobs must start from the active one
                raise
            if regressed and self._watch is not None:
                self._watch.activated(version, regressed=True)
            try:
                await self._ensure_served()
            except (EngineLost, StoreFull):
                raise
            except TandemError as error:
                await self._reactivate(before, f"version {version} could not be served: {error}")
                raise
        return {"version": version, "seconds": time.perf_counter() - started}

    async def _reactivate(self, version: int, why: str) -> None:
        _log.error("%s", why)
        await self.trainer.call(Activate(version))
        await self.store.activate(version, "server", why)
        await self._restore_served()

    async def _restore_served(self) -> None:
        """Publish the active version again if the engine holds another one. It may: the canary that refused a version
        is asked after the engine has switched to it."""
        if self.engine.version != self.store.active:
            await self._publish(self.store.active)

    def _check_kept(self, version: int) -> None:
        if (state := self.store.version(version)["state"]) != "kept":
            raise Conflict(f"version {version} is {state}: only a kept version can be served")

    async def _try_checkpoint(self) -> None:
        """Write a checkpoint. A failure, on a full disk for example, is logged; the next attempt comes later."""
        try:
            await self._checkpoint()
        except ConnectionLost:
            raise
        except TandemError as error:
            self._checkpoint_at, self._why_no_checkpoint = time.monotonic(), str(error)
            _log.error("no checkpoint: %s", error)

    async def _checkpoint(self) -> dict[str, Any]:
        usable = self.store.usable()
        keep = sorted({*usable[-self.spec.updates.keep :], max(self.store.active, 0)})
        if gone := [version for version in usable if version not in keep]:  # committed before their files are removed
            why = f"updates.keep = {self.spec.updates.keep} newer versions are kept"
            await self.store.mark(gone, "forgotten", why)
        written = msgspec.convert(await self.trainer.call(Checkpoint(keep)), messages.UpdateWritten)
        self._checkpointed, self._checkpoint_at = written.version, time.monotonic()
        self._why_no_checkpoint = ""
        if not written.already:
            self.events.put("checkpoint", msgspec.to_builtins(written))
        return msgspec.to_builtins(written)

    def checkpoint_due(self) -> bool:
        waited = time.monotonic() - self._checkpoint_at
        return self._checkpointed != self.store.active and waited >= self.spec.checkpoint.every_s

    # --- requests of the trainer process

    async def _handle(self, what: RpcCall) -> dict[str, Any]:
        match what:
            case JobProgress():
                if self._running is not None and self._running.id == what.job:
                    self._progress = {"step": what.step, "steps": what.steps, "metrics": what.metrics}
                    self.events.put("progress", {"id": what.job, **self._progress})
                return {}
            case _:
                return await self._publishing.handle(what)

    def _emit_job(self, id: str) -> None:
        job = self.store.job(id)
        self.events.put(
            "job", {"id": id, "state": job.state, "version": job.version, "why": job.why}, ended=job.state in ENDED
        )
