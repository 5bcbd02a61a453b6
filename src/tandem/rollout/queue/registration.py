"""Who takes part: the trainer's seat and those of environments."""

from __future__ import annotations

import dataclasses
import sqlite3
from itertools import count

from tandem.errors import Conflict
from tandem.io.request_key import RequestKey
from tandem.rollout.queue import tables as rows
from tandem.rollout.queue import validation as checks
from tandem.rollout.queue.core import Core
from tandem.rollout.queue.state import EnvironmentState, QueueEntry
from tandem.rollout.queue.types import EnvironmentSeat, RegisteredEnvironment, TrainerSeat, TrainerSpec


class Seats(Core):
    async def register_trainer(
        self, spec: TrainerSpec, *, fresh: bool = False, once: RequestKey | None = None
    ) -> TrainerSeat:
        """Again, by the same run: what an earlier registration holds under lease returns at once, and its calls are
        Fenced. With a lower version than before it has lost some: what those played is dropped. By another run:
        Conflict, unless `fresh` and nobody sits there: then whatever is queued for the run before is dropped."""
        self._wake()
        checks.check_trainer(spec)
        return await self._calls.whole(self._register_trainer(spec, fresh, once))

    async def _register_trainer(self, spec: TrainerSpec, fresh: bool, once: RequestKey | None) -> TrainerSeat:
        async with self._calls.turn(once) as earlier:
            if earlier is not None:
                return TrainerSeat(*earlier)
            state = self._state
            other = state.trainer is not None and state.trainer.run_id != spec.run_id
            if other and not fresh:
                assert state.trainer is not None
                raise Conflict(
                    f"this service holds groups of run '{state.trainer.run_id}'; register with fresh = true to drop "
                    "them and begin another run",
                    field="run_id",
                )
            if other:
                checks.check_left(state, self._clock(), self._waiting > 0)
                if left_over := len(rows.places(state)):
                    self.watch.count("dropped", left_over, reason="other_run")
                await self._begin_again()
            state.epoch += 1  # at once: whoever held the seat takes nothing any more
            leases = list(state.leases)
            undone = state.undone(spec.version) if spec.version < state.version else []
            seat = TrainerSeat(spec.run_id, state.epoch, spec.version, spec.slots)

            def change(db: sqlite3.Connection) -> None:
                rows.take_back(db, leases)
                self._dropping(undone, "undone")(db)
                rows.say(
                    db, trainer=dataclasses.asdict(spec), epoch=seat.epoch, version=seat.version, holding_acked=0,
                )  # fmt: skip

            for entry in undone:
                entry.busy = True  # whoever plays it puts nothing meanwhile
            try:
                await self._calls.write(change, once, dataclasses.astuple(seat))
            finally:
                for entry in undone:
                    entry.busy = False
            self._return(leases)
            state.holding.clear()
            self._never_made(spec.version, undone)
            state.trainer, state.version, state.dropped_in_a_row = spec, seat.version, 0
            self._go_on()
            return seat

    def _never_made(self, version: int, written: list[QueueEntry]) -> None:
        """The trainer went back to `version`. `written`: what the disk has forgotten with that; the rest came while it
        was written."""
        state = self._state
        if version >= state.version:
            return
        state.backs += 1
        gone = {entry.id for entry in written if entry.id in state.entries}
        state.leave_lines(lambda entry: entry.id in gone)
        found = [entry for entry in written if entry.id in gone]
        self._dropped(found, "undone")
        self._forget(found)
        late = state.undone(version)
        state.leave_lines(lambda entry: entry.newest > version)
        self._leave_out(late, "undone")

    async def leave(self, epoch: int, *, once: RequestKey | None = None) -> None:
        """The trainer goes: what it holds under lease returns at once, and another run may sit down. What is queued for
        its run stays, for when it comes again."""
        await self._calls.whole(self._leave(epoch, once))

    async def _leave(self, epoch: int, once: RequestKey | None) -> None:
        async with self._calls.turn(once) as earlier:
            if earlier is not None:
                return
            self._check_epoch(epoch)
            state, leases = self._state, list(self._state.leases)
            state.epoch += 1  # its calls that come late take nothing

            def change(db: sqlite3.Connection) -> None:
                rows.take_back(db, leases)
                rows.say(db, epoch=state.epoch, holding_acked=0)

            await self._calls.write(change, once, [])
            self._return(leases)
            state.holding.clear()
            self._go_on()

    async def announce_version(self, epoch: int, version: int, *, once: RequestKey | None = None) -> None:
        """The trainer holds `version` now; what became too old with it is dropped when its turn comes."""
        await self._calls.whole(self._announce(epoch, version, once))

    async def _announce(self, epoch: int, version: int, once: RequestKey | None = None) -> None:
        self._check_epoch(epoch)
        async with self._calls.turn(once) as earlier:
            if earlier is not None:
                return
            was = self._state.version
            if version < was:
                raise Conflict(f"version {version}, but this registration was at {was} already", field="version")
            if version == was:
                if once is not None:  # its key is used up all the same
                    await self._calls.write(lambda _: None, once, [])
                return
            await self._calls.write(lambda db: rows.say(db, version=version), once, [])
            self._state.version = max(version, self._state.version)
            self._leave_out(self._stale_in_lines(), "stale")
            self._go_on()

    def _stale_in_lines(self) -> list[QueueEntry]:
        """They would be found out when their turn comes; until then they would take the room of others."""
        return self._state.leave_lines(lambda entry: self._state.is_stale(entry.oldest))

    async def register_environment(
        self, spec: RegisteredEnvironment, *, once: RequestKey | None = None
    ) -> EnvironmentSeat:
        """Conflict while no trainer has registered, or where it has another tokenizer."""
        return await self._calls.whole(self._register_environment(spec, once))

    async def _register_environment(self, spec: RegisteredEnvironment, once: RequestKey | None) -> EnvironmentSeat:
        async with self._calls.turn(once) as earlier:
            if earlier is not None and earlier[0] >= self._state.first_environment:
                return EnvironmentSeat(*earlier)
            known = self._state.environments
            checks.check_environment(spec, self._state.trainer, known.values(), self.limits)
            id = self._state.next_environment
            names = {each.name for each in known.values()}
            name = next(name for k in count() if (name := f"{spec.name}_{k}") not in names)
            made = EnvironmentState(id, name, spec, self._clock())
            known[id] = made  # before it is written: the next one has another id
            self._state.next_environment = id + 1

            def change(db: sqlite3.Connection) -> None:
                rows.add_environment(db, made)
                rows.say(db, next_environment=id + 1)

            run = self._run
            try:
                await self._calls.write(change, once, [id, made.name])
            except BaseException:
                known.pop(id, None)
                raise
            if run != self._run:
                raise Conflict("another run began while the environment was registered; register it again")
            self._state.share_out()
            return EnvironmentSeat(id, made.name)

    async def disconnect(self, environment: int, *, once: RequestKey | None = None) -> None:
        """Its tickets lapse; what it has put stays."""
        await self._calls.whole(self._disconnect(environment, once))

    async def _disconnect(self, environment: int, once: RequestKey | None) -> None:
        async with self._calls.turn(once) as earlier:
            if earlier is not None:
                return
            each = self._environment(environment)
            gone = dataclasses.replace(each, connected=False)
            await self._calls.write(lambda db: rows.add_environment(db, gone), once, [])
            each.connected = False
            self._lapse({environment}, "disconnected")

    async def reset(self) -> None:
        """Forgets everything but its own counts: groups, leases, environments, the trainer."""
        await self._calls.whole(self._reset())

    async def _reset(self) -> None:
        await self._begin_again()
        await self._calls.write(lambda db: rows.say(db, trainer=None, version=0, holding_acked=0))
        self._state.trainer, self._state.version = None, 0
        self._state.holding.clear()
        self._go_on()
