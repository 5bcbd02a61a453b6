"""What goes into the rollout queue and what comes out of it: plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What one service takes before it says no."""

    max_queued: int = 20_000
    """Groups that wait, all environments together."""
    max_environments: int = 4096
    max_groups_per_post: int = 4096
    max_wait_s: float = 60.0
    """Of a long poll."""
    max_play_s: float = 3600.0
    """From a ticket to its group; then it is dropped, so that one lost episode does not hold up every batch."""
    answers_kept_s: float = 7 * 86400.0
    """How long an idempotency key is remembered."""
    quarantine_rows: int = 1000
    quarantine_bytes: int = 65536
    """Of a refused body: how much of it is kept."""
    reserve_bytes: int = 32 * 2**20
    """What payloads leave free on the disk."""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """A run, as its trainer registers it."""

    run_id: str
    groups_per_step: int = 0
    """Slots are (max_lag + 1) times this. 0: batches are counted in sequences, and slots are made as they are asked."""
    sequences_per_step: int = 0
    """Where batches are counted in sequences: how many. A larger group could never leave, and is refused."""
    max_lag: int = 0
    """Groups older than this are dropped when their turn comes; -1 takes any."""
    version: int = 0
    """What the trainer holds now: 0, or a checkpoint's."""
    num_ids: int = 0
    max_tokens: int = 0
    tokenizer: str = ""
    """A digest of it. Environments that name another are refused."""
    max_dropped: int = 256
    """Groups dropped in a row, before `take` says Starved; 0 for never."""
    lease_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The trainer's own; given to environments that ask."""

    @property
    def slots(self) -> int:
        return (self.max_lag + 1) * self.groups_per_step


@dataclass(frozen=True, slots=True)
class TrainerSeat:
    """`epoch` goes with every call of the trainer; a later registration makes an earlier one's calls Fenced."""

    run_id: str
    epoch: int
    version: int
    slots: int


@dataclass(frozen=True, slots=True)
class RegisteredEnvironment:
    name: str
    weight: float = 1.0
    """Its part of what is trained on, against the weights of the others."""
    min_share: float = 0.0
    """At least this part of it, whatever the weights."""
    group_size: int = 0
    """Exactly so many siblings; 0 for any number."""
    max_tokens: int = 0
    lapse_s: float = 300.0
    """Silent for so long, its tickets lapse and its share goes to the others, until it speaks again."""
    tokenizer: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class EnvironmentSeat:
    id: int
    name: str
    """The name that was asked for, and a number that makes it this one's: `maths_0`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a group that was put: `queued`, or dropped at once because it is `stale`."""

    id: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Taken:
    """A group in a trainer's hands."""

    id: int
    order: int
    environment: int
    size: int
    tokens: int
    lag: int
    """Versions between its oldest trained token and the trainer; one of an unknown version counts from when it came."""
    frame: bytes


@dataclass(frozen=True, slots=True)
class Lease:
    """Groups that are the trainer's until it acknowledges them, or until `seconds` pass without `renew`."""

    id: int
    version: int
    """The trainer's, when they were handed out."""
    seconds: float
    groups: tuple[Taken, ...]

    @property
    def sequences(self) -> int:
        return sum(group.size for group in self.groups)
