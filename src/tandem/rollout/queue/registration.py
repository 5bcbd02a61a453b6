"""Calls that register and remove the trainer and the environments of the rollout queue."""

from __future__ import annotations

import dataclasses
import sqlite3
from itertools import count

from tandem.errors import Conflict
from tandem.io.request_key import RequestKey
from tandem.rollout.queue import tables, validation
from tandem.rollout.queue.core import QueueCore
from tandem.rollout.queue.state import EnvironmentState, QueueEntry
from tandem.rollout.queue.types import EnvironmentHandle, RegisteredEnvironment, TrainerHandle, TrainerSpec


class Registration:
    def __init__(self, core: QueueCore) -> None:
        self._core = core

    async def register_trainer(
        self, spec: TrainerSpec, *, fresh: bool = False, once: RequestKey | None = None
    ) -> TrainerHandle:
        """Register the trainer and return its handle.

        A second registration by the same run returns the leases of the first at once and fences its calls. With a
        lower version than before, the trainer lost some versions, and groups played by those are dropped. Another run
        gets Conflict, unless it sets `fresh` and the first trainer is gone: then the first run's groups are dropped."""
        self._core.start_ticking()
        validation.check_trainer(spec)
        return await self._core.calls.run_to_end(self._register_trainer(spec, fresh, once))

    async def _register_trainer(self, spec: TrainerSpec, fresh: bool, once: RequestKey | None) -> TrainerHandle:
        async with self._core.calls.one_at_a_time(once) as earlier:
            if earlier is not None:
                return TrainerHandle(*earlier)
            state = self._core.state
            other = state.trainer is not None and state.trainer.run_id != spec.run_id
            if other and not fresh:
                assert state.trainer is not None
                raise Conflict(
                    f"this service holds groups of run '{state.trainer.run_id}'; register with fresh = true to drop "
                    "them and begin another run",
                    field="run_id",
                )
            if other:
                validation.check_left(state, self._core.clock(), self._core.waiting_takes > 0)
                if left_over := len(tables.places(state)):
                    self._core.stats.count("dropped", left_over, reason="other_run")
                await self._core.forget_run()
            state.epoch += 1  # before the write: the earlier trainer must take no more groups
            leases = list(state.leases)
            undone = state.newer_than(spec.version) if spec.version < state.version else []
            handle = TrainerHandle(spec.run_id, state.epoch, spec.version, spec.slots)

            def change(db: sqlite3.Connection) -> None:
                tables.return_leases(db, leases)
                self._core.drop_on_disk(undone, "undone")(db)
                tables.set_facts(
                    db, trainer=dataclasses.asdict(spec), epoch=handle.epoch, version=handle.version, holding_acked=0,
                )  # fmt: skip

            for entry in undone:
                entry.writing = True  # its environment must not put the group during the write
            try:
                await self._core.calls.write(change, once, dataclasses.astuple(handle))
            finally:
                for entry in undone:
                    entry.writing = False
            self._core.return_leases(leases)
            state.unreleased.clear()
            self._drop_newer(spec.version, undone)
            state.trainer, state.version, state.dropped_in_a_row = spec, handle.version, 0
            self._core.notify()
            return handle

    def _drop_newer(self, version: int, written: list[QueueEntry]) -> None:
        """Drop groups newer than `version`, to which the trainer went back. `written`: those already removed from disk;
        others may have arrived during that write."""
        state = self._core.state
        if version >= state.version:
            return
        state.rollbacks += 1
        gone = {entry.id for entry in written if entry.id in state.entries}
        state.remove_from_backlogs(lambda entry: entry.id in gone)
        found = [entry for entry in written if entry.id in gone]
        self._core.drop_in_memory(found, "undone")
        self._core.delete_payloads(found)
        late = state.newer_than(version)
        state.remove_from_backlogs(lambda entry: entry.newest > version)
        self._core.drop_later(late, "undone")

    async def leave(self, epoch: int, *, once: RequestKey | None = None) -> None:
        """Unregister the trainer. Its leases return at once, and another run may register. The groups queued for its
        run stay, in case it registers again."""
        await self._core.calls.run_to_end(self._leave(epoch, once))

    async def _leave(self, epoch: int, once: RequestKey | None) -> None:
        async with self._core.calls.one_at_a_time(once) as earlier:
            if earlier is not None:
                return
            self._core.check_epoch(epoch)
            state, leases = self._core.state, list(self._core.state.leases)
            state.epoch += 1  # calls of it that arrive late are fenced

            def change(db: sqlite3.Connection) -> None:
                tables.return_leases(db, leases)
                tables.set_facts(db, epoch=state.epoch, holding_acked=0)

            await self._core.calls.write(change, once, [])
            self._core.return_leases(leases)
            state.unreleased.clear()
            self._core.notify()

    async def register_environment(
        self, spec: RegisteredEnvironment, *, once: RequestKey | None = None
    ) -> EnvironmentHandle:
        """Register an environment and return its handle. Conflict while no trainer has registered."""
        return await self._core.calls.run_to_end(self._register_environment(spec, once))

    async def _register_environment(self, spec: RegisteredEnvironment, once: RequestKey | None) -> EnvironmentHandle:
        async with self._core.calls.one_at_a_time(once) as earlier:
            if earlier is not None and earlier[0] >= self._core.state.first_environment:
                return EnvironmentHandle(*earlier)
            known = self._core.state.environments
            validation.check_environment(spec, self._core.state.trainer, known.values(), self._core.limits)
            id = self._core.state.next_environment
            names = {each.name for each in known.values()}
            name = next(name for k in count() if (name := f"{spec.name}_{k}") not in names)
            made = EnvironmentState(id, name, spec, self._core.clock())
            known[id] = made  # before the write, so that the next registration gets another id
            self._core.state.next_environment = id + 1

            def change(db: sqlite3.Connection) -> None:
                tables.add_environment(db, made)
                tables.set_facts(db, next_environment=id + 1)

            run = self._core.run_number
            try:
                await self._core.calls.write(change, once, [id, made.name])
            except BaseException:
                known.pop(id, None)
                raise
            if run != self._core.run_number:
                raise Conflict("another run began during this registration; register the environment again")
            self._core.state.update_shares()
            return EnvironmentHandle(id, made.name)

    async def disconnect(self, environment: int, *, once: RequestKey | None = None) -> None:
        """Unregister an environment. Its tickets lapse; the groups that it put stay."""
        await self._core.calls.run_to_end(self._disconnect(environment, once))

    async def _disconnect(self, environment: int, once: RequestKey | None) -> None:
        async with self._core.calls.one_at_a_time(once) as earlier:
            if earlier is not None:
                return
            each = self._core.environment(environment)
            gone = dataclasses.replace(each, connected=False)
            await self._core.calls.write(lambda db: tables.add_environment(db, gone), once, [])
            each.connected = False
            self._core.drop_tickets({environment}, "disconnected")

    async def reset(self) -> None:
        """Forget everything except the statistics: groups, leases, environments, the trainer."""
        await self._core.calls.run_to_end(self._reset())

    async def _reset(self) -> None:
        await self._core.forget_run()
        await self._core.calls.write(lambda db: tables.set_facts(db, trainer=None, version=0, holding_acked=0))
        self._core.state.trainer, self._core.state.version = None, 0
        self._core.state.unreleased.clear()
        self._core.notify()
