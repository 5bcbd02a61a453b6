"""The rollout queue: groups from many environments to one trainer, durable, each trained on once.

consumes: groups, from whoever registered       waits for: slots (admit), the oldest start (take), the disk (all)
produces: leases of groups, oldest started first

The semantics are those of `tandem.rollout.store.MemoryStore`: a slot is held from `admit` to `release` or `drop`, and
that bounds staleness. To them it adds what happens between processes: everything survives a kill, a lease that is not
acknowledged returns, environments have shares and may fall silent, and every call may come twice.

Every call runs on one event loop. Nothing returns before it is on the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.rollout.queue_types import (
    EnvironmentSeat,
    EnvironmentSpec,
    Lease,
    Once,
    QueueLimits,
    Stored,
    Taken,
    TrainerSeat,
    TrainerSpec,
)
from tandem.rollout.wire import WireGroup
from tandem.types import Ticket


class RolloutQueue:
    """`once`, where a call takes it, makes a repeated call the same call: see `Once`."""

    def __init__(self, directory: Path, limits: QueueLimits | None = None) -> None:
        """Owns the directory, and finds in it what was left there; StoreOwned if another process does."""
        self.limits = limits or QueueLimits()
        self.directory = directory
        raise NotImplementedError

    # --- registration

    async def register_trainer(
        self, spec: TrainerSpec, *, fresh: bool = False, once: Once | None = None
    ) -> TrainerSeat:
        """Again, by the same run: what an earlier registration holds under lease returns at once, and its calls are
        Fenced. By another run: Conflict, unless `fresh`: then whatever is queued for the run before is dropped."""
        raise NotImplementedError

    async def announce_version(self, epoch: int, version: int, *, once: Once | None = None) -> None:
        """The trainer holds `version` now; what became too old with it is dropped when its turn comes."""
        raise NotImplementedError

    async def register_environment(self, spec: EnvironmentSpec, *, once: Once | None = None) -> EnvironmentSeat:
        raise NotImplementedError

    async def disconnect(self, environment: int, *, once: Once | None = None) -> None:
        """Its tickets lapse; what it has put stays."""
        raise NotImplementedError

    def seen(self, environment: int) -> None:
        """It lives: every other call of an environment says so too. NotKnown if it is not registered."""
        raise NotImplementedError

    # --- an environment's calls

    async def admit(
        self, environment: int, count: int = 1, *, wait_s: float = 0.0, once: Once | None = None
    ) -> list[Ticket]:
        """Up to `count` tickets, one at least; none when `wait_s` has passed without a slot."""
        raise NotImplementedError

    async def put(
        self, groups: Sequence[WireGroup], *, environment: int | None = None, once: Once | None = None
    ) -> list[Stored]:
        """All of them or none. Each names its environment and, where it was played on one, its ticket;
        `environment` stands for those whose head names none. A group without a ticket waits in its environment's line
        for a slot. GroupRefused, QueueFull, StoreFull, Conflict (the ticket lapsed)."""
        raise NotImplementedError

    async def drop(self, environment: int, ticket: int, reason: str, *, once: Once | None = None) -> None:
        """Nothing to learn; the slot is free at once."""
        raise NotImplementedError

    async def quarantine(self, environment: int | None, field: str, reason: str, body: bytes | memoryview) -> None:
        """Keeps the beginning of what was refused, with the reason, for whoever looks into it."""
        raise NotImplementedError

    # --- the trainer's calls

    async def take(
        self,
        epoch: int,
        count: int = 0,
        *,
        sequences: int = 0,
        wait_s: float = 0.0,
        once: Once | None = None,
    ) -> Lease | None:
        """`count` groups, or groups that hold exactly `sequences` siblings; oldest started first. None when `wait_s`
        has passed without them. Starved after too many drops in a row."""
        raise NotImplementedError

    async def renew(self, epoch: int, lease: int) -> None:
        """NotKnown if it lapsed: its groups are in the queue again, or somebody else's."""
        raise NotImplementedError

    async def release(self, epoch: int, count: int, *, once: Once | None = None) -> None:
        """The slots of the `count` groups taken first: the engine holds the version that they made."""
        raise NotImplementedError

    async def ack(
        self, epoch: int, leases: Sequence[int] = (), *, groups: Sequence[int] = (), once: Once | None = None
    ) -> int:
        """They are in a checkpoint: forgotten for good. How many were still held. Again is no error."""
        raise NotImplementedError

    # --- for people, and for compatible services

    @property
    def trainer(self) -> TrainerSpec | None: ...

    @property
    def version(self) -> int: ...

    @property
    def queued(self) -> int:
        """Groups that wait to be taken."""
        raise NotImplementedError

    def environment(self, environment: int) -> EnvironmentSpec:
        raise NotImplementedError

    def environment_status(self, environment: int) -> dict[str, Any]:
        """`queued`, `in_flight`, `put`, `dropped` by reason, `weight`, `share` of what was admitted, `silent_s`."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """Everything that `tandem rollouts top` shows."""
        raise NotImplementedError

    async def group(self, group: int) -> Taken:
        """One that is queued or under lease, to look at."""
        raise NotImplementedError

    async def answer(self, once: Once) -> dict[str, Any] | None:
        """What the key was answered before; KeyReused if that was for another body. For compatible services."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
