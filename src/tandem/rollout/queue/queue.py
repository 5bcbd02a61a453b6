"""The durable rollout queue: groups from many environments to one trainer, each trained on once.

consumes: groups from registered environments   waits for: slots (admit), the oldest start (take), the disk (all)
produces: leases of groups, oldest started first

The semantics are those of `tandem.rollout.store.MemoryStore`: a group holds a slot from `admit` to `release` or `drop`,
and that bounds staleness. The queue adds what several processes need: everything survives a kill, a lease that is not
acknowledged returns, environments have shares and may fall silent, and a client may repeat every call.

Every call runs on one event loop, in this order: decide in memory, without awaiting; write to disk; apply the result in
memory, where other calls see it; return.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.errors import NotKnown
from tandem.io.request_key import RequestKey
from tandem.rollout.queue import tables, validation
from tandem.rollout.queue.core import QueueCore
from tandem.rollout.queue.environment_calls import EnvironmentCalls
from tandem.rollout.queue.registration import Registration
from tandem.rollout.queue.trainer_calls import TrainerCalls
from tandem.rollout.queue.types import QueueLimits, RegisteredEnvironment, Taken, TrainerSpec


class RolloutQueue:
    """One object for each party's calls, over one core. `once`, where a call takes it, makes a repeated call the same
    call: see `RequestKey`."""

    def __init__(
        self, directory: Path, limits: QueueLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Lock the directory and read back the state in it. StoreOwned if another process has locked it."""
        self.core = QueueCore(directory, limits, clock=clock)
        self.registration = Registration(self.core)
        self.environments = EnvironmentCalls(self.core)
        self.trainer = TrainerCalls(self.core)
        self.limits, self.stats = self.core.limits, self.core.stats

    @property
    def broken(self) -> str:
        """Why the disk takes no more writes; empty while it does."""
        return self.core.broken

    @property
    def trainer_spec(self) -> TrainerSpec | None:
        return self.core.state.trainer

    @property
    def epoch(self) -> int:
        return self.core.state.epoch

    @property
    def version(self) -> int:
        return self.core.state.version

    @property
    def queued(self) -> int:
        """Number of groups that wait to be taken."""
        return self.core.state.queued

    def environment_spec(self, environment: int) -> RegisteredEnvironment:
        return self.core.environment(environment).spec

    def environment_status(self, environment: int) -> dict[str, Any]:
        """Return the environment's row of `status`: `queued`, `playing`, `counts`, `weight`, `share`, `silent_s` ..."""
        return self.core.stats.environments([self.core.environment(environment)], self.core.state)[0]

    @property
    def why_no_batch(self) -> str:
        """Why groups of the sizes seen so far can never make a batch; empty if they can."""
        return validation.why_no_batch(self.core.state)

    def status(self) -> dict[str, Any]:
        """Return everything that `tandem rollouts top` shows."""
        stored = {"bytes": self.core.segments.size_bytes, "broken": self.core.broken}
        return self.core.stats.status(self.core.state, self.core.limits, stored)

    def quarantined(self, most: int = 100) -> list[dict[str, Any]]:
        return tables.quarantined(self.core.db, most)

    def groups(self, most: int = 20) -> list[int]:
        """Return the ids of the latest groups that are still stored."""
        stored = (entry.id for entry in reversed(self.core.state.entries.values()) if entry.place is not None)
        return list(islice(stored, most))[::-1]

    async def group(self, group: int) -> Taken:
        """Return a group that is queued or under lease, for inspection."""
        entry = self.core.state.entries.get(group)
        if entry is None or entry.place is None:
            raise NotKnown(f"group {group} is not stored: it was trained on or dropped, or never existed", field="id")
        return self.core.to_taken([entry], await self.core.read_frames([entry]))[0]

    async def answer(self, once: RequestKey) -> Any:
        """Return the earlier reply to the key, or None; KeyReused if that request had another body."""
        return tables.answered(self.core.db, once)

    async def close(self) -> None:
        """Finish the running calls, then close the disk."""
        await self.core.close()
