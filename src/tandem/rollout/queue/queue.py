"""The rollout queue: groups from many environments to one trainer, durable, each trained on once.

consumes: groups, from whoever registered       waits for: slots (admit), the oldest start (take), the disk (all)
produces: leases of groups, oldest started first

The semantics are those of `tandem.rollout.store.MemoryStore`: a slot is held from `admit` to `release` or `drop`, and
that bounds staleness. To them it adds what happens between processes: everything survives a kill, a lease that is not
acknowledged returns, environments have shares and may fall silent, and every call may come twice.

Every call runs on one event loop, and nothing returns before it is on the disk. What a call decides it decides in
memory and at once; then it is written; only then do others see what it made.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any

from tandem.errors import NotKnown
from tandem.io.request_key import RequestKey
from tandem.rollout.queue import tables as rows
from tandem.rollout.queue import validation as checks
from tandem.rollout.queue.environment_calls import Intake
from tandem.rollout.queue.trainer_calls import HandOut
from tandem.rollout.queue.types import RegisteredEnvironment, Taken, TrainerSpec


class RolloutQueue(Intake, HandOut):
    """`once`, where a call takes it, makes a repeated call the same call: see `RequestKey`. An environment's calls are
    in `Intake`, a trainer's in `HandOut`, registration in `Seats`."""

    @property
    def trainer(self) -> TrainerSpec | None:
        return self._state.trainer

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def queued(self) -> int:
        """Groups that wait to be taken."""
        return self._state.queued

    def environment(self, environment: int) -> RegisteredEnvironment:
        return self._environment(environment).spec

    def environment_status(self, environment: int) -> dict[str, Any]:
        """`queued`, `playing`, `counts`, `weight`, `share` that is due to it, `admitted`, `silent_s`."""
        return self.watch.environments([self._environment(environment)], self._state)[0]

    @property
    def why_no_batch(self) -> str:
        """Why groups of the sizes that come never make a batch; empty if they can."""
        return checks.why_no_batch(self._state)

    def status(self) -> dict[str, Any]:
        """Everything that `tandem rollouts top` shows."""
        stored = {"bytes": self._segments.size_bytes, "broken": self.broken}
        return self.watch.status(self._state, self.limits, stored)

    def quarantined(self, most: int = 100) -> list[dict[str, Any]]:
        return rows.quarantined(self._db, most)

    def groups(self, most: int = 20) -> list[int]:
        """Ids of what came last and is not forgotten yet."""
        there = (entry.id for entry in reversed(self._state.entries.values()) if entry.place is not None)
        return list(islice(there, most))[::-1]

    async def group(self, group: int) -> Taken:
        """One that is queued or under lease, to look at."""
        entry = self._state.entries.get(group)
        if entry is None or entry.place is None:
            raise NotKnown(f"group {group} is not here; it was trained on, was dropped, or never was", field="id")
        return self._taken([entry], await self._frames([entry]))[0]

    async def answer(self, once: RequestKey) -> Any:
        """What the key was answered before, or None; KeyReused if that was for another body."""
        return rows.answered(self._db, once)

    async def close(self) -> None:
        """What is under way ends first."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self._calls.end()
        await asyncio.to_thread(self._db.close)
        self._segments.close()
