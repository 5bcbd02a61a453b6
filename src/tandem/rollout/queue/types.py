"""Plain data that the rollout queue takes and returns: limits, specs, handles, leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What one service accepts before it refuses."""

    max_queued: int = 20_000
    """Groups that wait to be taken, summed over all environments."""
    max_environments: int = 4096
    max_groups_per_post: int = 4096
    max_wait_s: float = 60.0
    """The longest that a long poll waits."""
    max_play_s: float = 3600.0
    """From a ticket to its group. Then the queue drops the ticket: one lost episode must not block every batch."""
    answers_kept_s: float = 7 * 86400.0
    """How long the queue remembers an idempotency key."""
    quarantine_rows: int = 1000
    quarantine_bytes: int = 65536
    """How many bytes of a refused body are kept."""
    reserve_bytes: int = 32 * 2**20
    """Disk space that payloads leave free."""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """A run, as its trainer registers it."""

    run_id: str
    groups_per_step: int = 0
    """There are (max_lag + 1) times this many slots. 0: batches are counted in sequences, and slots are unlimited."""
    sequences_per_step: int = 0
    """Sequences in a batch, where batches are counted in sequences. A larger group would never fit and is refused."""
    max_lag: int = 0
    """Groups older than this many versions are dropped before they are handed out; -1 accepts any age."""
    version: int = 0
    """The trainer's version now: 0, or that of the checkpoint it resumed from."""
    num_ids: int = 0
    max_tokens: int = 0
    tokenizer: str = ""
    """Digest of the tokenizer. An environment that names another is refused."""
    max_dropped: int = 256
    """After so many drops in a row `take` raises Starved; 0 for never."""
    lease_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Free-form values from the trainer; environments can read them."""

    @property
    def slots(self) -> int:
        return (self.max_lag + 1) * self.groups_per_step


@dataclass(frozen=True, slots=True)
class TrainerHandle:
    """A trainer's registration. It sends `epoch` with every call; a later registration fences the calls of this one."""

    run_id: str
    epoch: int
    version: int
    slots: int


@dataclass(frozen=True, slots=True)
class RegisteredEnvironment:
    """How an environment registers."""

    name: str
    weight: float = 1.0
    """Its share of the trained groups, relative to the weights of the other environments."""
    min_share: float = 0.0
    """Its lowest share, whatever the weights."""
    group_size: int = 0
    """Siblings in each of its groups; 0 for any number."""
    max_tokens: int = 0
    lapse_s: float = 300.0
    """After so long without a call its tickets lapse and its share goes to the others, until its next call."""
    tokenizer: str = ""
    """Fingerprint of its tokenizer; the service refuses one that differs from the trainer's."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class EnvironmentHandle:
    """An environment's registration."""

    id: int
    name: str
    """The requested name and a number that makes it unique: `maths_0`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The outcome of a group that was put: `queued`, or dropped at once as `stale` or `undone`."""

    id: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Taken:
    """A group that was handed to the trainer."""

    id: int
    order: int
    environment: int
    size: int
    tokens: int
    lag: int
    """The trainer's version less that of its oldest trained token; unknown versions count from the group's arrival."""
    frame: bytes


@dataclass(frozen=True, slots=True)
class Lease:
    """Groups that the trainer holds until it acknowledges them, or until `seconds` pass without `renew`."""

    id: int
    version: int
    """The trainer's version when they were handed out."""
    seconds: float
    groups: tuple[Taken, ...]

    @property
    def sequences(self) -> int:
        return sum(group.size for group in self.groups)
