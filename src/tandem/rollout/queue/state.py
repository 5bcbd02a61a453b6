"""The rollout queue's state in memory: who waits, in which order, and the next batch. No disk, no clock.

A group that was put without a ticket waits in its environment's backlog. Requests for tickets and backlogs compete for
slots: the environment furthest behind its share is next. An admitted entry gets an order number, and groups are handed
out in that order.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, islice

from tandem.io.append_only_segments import SegmentPlace
from tandem.rollout.queue.types import RegisteredEnvironment, TrainerSpec
from tandem.types import NO_VERSION

_LOOK_AHEAD = 4096  # groups to consider when a batch must hold an exact number of sequences
_CREDIT = 16  # how far behind its share an idle environment may fall, in groups


@dataclass(slots=True)
class QueueEntry:
    """A group, or the ticket for one."""

    id: int
    environment: int
    order: int = -1
    """-1: in its environment's backlog."""
    place: SegmentPlace | None = None
    """None while its episodes are being played."""
    size: int = 0
    tokens: int = 0
    oldest: int = NO_VERSION
    newest: int = NO_VERSION
    since: float = 0.0
    """Monotonic time when its ticket was given, or when it was put without one."""
    writing: bool = False
    """A write to disk is in progress: the entry must not lapse now."""


@dataclass(slots=True)
class WaitingEnvironment:
    """A call of an environment that waits for tickets."""

    count: int
    answer: asyncio.Future[None]
    rollbacks: int = 0
    """`QueueState.rollbacks` when its tickets were granted."""
    granted: list[QueueEntry] = field(default_factory=list[QueueEntry])


@dataclass(slots=True)
class EnvironmentState:
    id: int
    name: str
    spec: RegisteredEnvironment
    seen: float
    connected: bool = True
    silent: bool = False
    share: float = 0.0
    virtual_time: float = 0.0
    """Grows by 1 / share with each admitted group; the lowest is admitted next."""
    admitted: int = 0
    writes: int = 0
    """Calls that are writing groups of it."""
    backlog: deque[QueueEntry] = field(default_factory=deque[QueueEntry])
    waiters: deque[WaitingEnvironment] = field(default_factory=deque[WaitingEnvironment])
    counts: Counter[str] = field(default_factory=Counter[str])
    """Groups put, and groups dropped by reason."""

    @property
    def live(self) -> bool:
        return self.connected and not self.silent

    @property
    def declared_size(self) -> int:
        """The group size that it registered; 0 if none."""
        size = self.spec.group_size or self.spec.extra.get("group_size")  # Atropos environments may send others too
        return size if isinstance(size, int) else 0

    def is_waiting(self) -> bool:
        while self.waiters and (self.waiters[0].answer.done() or not self.live):
            gone = self.waiters.popleft()
            if not gone.answer.done():
                gone.answer.set_result(None)
        return bool(self.backlog or self.waiters)


@dataclass(slots=True)
class LeaseState:
    id: int
    version: int
    entries: list[QueueEntry]
    expires: float


class QueueState:
    def __init__(self) -> None:
        self.trainer: TrainerSpec | None = None
        self.epoch = self.version = 0
        self.next_id = self.next_order = self.next_lease = 1
        self.environments: dict[int, EnvironmentState] = {}
        self.first_environment = self.next_environment = 1
        """The first id of this run. Ids of earlier runs are never reused: calls of their environments are refused."""
        self.rollbacks = 0
        """Counts how often a trainer went back to an earlier version."""
        self.being_written = 0
        """Groups without a ticket that are being written to disk."""
        self.entries: dict[int, QueueEntry] = {}
        """Every stored group and open ticket, by id."""
        self.in_flight: dict[int, QueueEntry] = {}
        """Admitted and not taken, by order."""
        self.playing: dict[int, QueueEntry] = {}
        """Those of them whose group has not arrived, by order."""
        self.leases: dict[int, LeaseState] = {}
        self.acked: set[int] = set()
        """Leases that were acknowledged in full. Any other lease that is not held has lapsed."""
        self.unreleased: deque[QueueEntry | None] = deque()
        """Taken and not released, oldest first; None for a group that was acknowledged before a restart."""
        self.in_backlogs = 0
        self.dropped_in_a_row = 0
        self._now = 0.0

    # --- counting

    @property
    def slots(self) -> int:
        return self.trainer.slots if self.trainer else 0

    @property
    def held(self) -> int:
        return len(self.in_flight) + len(self.unreleased)

    @property
    def queued(self) -> int:
        return len(self.entries) - len(self.playing) - sum(len(lease.entries) for lease in self.leases.values())

    def lag(self, entry: QueueEntry) -> int:
        return 0 if entry.oldest == NO_VERSION else max(0, self.version - entry.oldest)

    def is_stale(self, oldest: int) -> bool:
        limit = self.trainer.max_lag if self.trainer else -1
        return limit >= 0 and oldest != NO_VERSION and self.version - oldest > limit

    def is_too_new(self, newest: int) -> bool:
        """Return whether `newest` is newer than any version that an engine can hold. A trainer holds at most
        max_lag + 1 batches before it calls again and announces its version; it may publish a version after each."""
        limit = self.trainer.max_lag if self.trainer else -1
        return limit >= 0 and newest > self.version + max(limit, 1) + 1

    def newer_than(self, version: int) -> list[QueueEntry]:
        """Return the entries newer than `version`, leased ones included, for a trainer that goes back to it. Open
        tickets count too: their version is unknown. Entries being written are checked when their write ends."""
        leased = [e for lease in self.leases.values() for e in lease.entries if e.newest > version]
        waiting = [e for e in self.in_flight.values() if not e.writing and (e.place is None or e.newest > version)]
        return leased + waiting + [e for each in self.environments.values() for e in each.backlog if e.newest > version]

    def remove_from_backlogs(self, unwanted: Callable[[QueueEntry], bool]) -> list[QueueEntry]:
        removed: list[QueueEntry] = []
        for each in self.environments.values():
            if found := [entry for entry in each.backlog if unwanted(entry)]:
                each.backlog = deque(entry for entry in each.backlog if not unwanted(entry))
                removed += found
        self.in_backlogs -= len(removed)
        return removed

    # --- shares

    def update_shares(self) -> None:
        """Compute each live environment's share: by weight, but no less than its minimum."""
        for each in self.environments.values():
            each.share = 0.0
            if not each.admitted and not each.virtual_time:
                each.virtual_time = self._now  # a new environment starts without credit
        # Highest minimum per weight first: once a share by weight meets one minimum, it meets all later ones.
        live = [each for each in self.environments.values() if each.live]
        live.sort(key=lambda each: each.spec.min_share / each.spec.weight, reverse=True)
        weights = list(accumulate(each.spec.weight for each in reversed(live)))  # of it and all later ones, reversed
        rest = 1.0
        for each in live:
            each.share = max(each.spec.min_share, rest * each.spec.weight / weights.pop(), 1e-6)
            rest = max(0.0, rest - each.share)

    def _next_environment(self, *, lines: bool = False) -> EnvironmentState | None:
        waiting = [each for each in self.environments.values() if (each.backlog if lines else each.is_waiting())]
        if not waiting:
            return None
        chosen = min(waiting, key=lambda each: (self._start_time(each), each.id))
        chosen.virtual_time = self._start_time(chosen)
        self._now = max(self._now, chosen.virtual_time)
        chosen.virtual_time += self._cost(chosen) / self._share(chosen)
        chosen.admitted += 1
        return chosen

    def _cost(self, each: EnvironmentState) -> int:
        """The cost of its next group: its sequences where batches are counted in sequences, otherwise 1."""
        by_sequences = self.trainer is not None and self.trainer.sequences_per_step
        return each.backlog[0].size if by_sequences and each.backlog else 1

    def _start_time(self, each: EnvironmentState) -> float:
        """Return its virtual start time. An idle environment returns with limited credit, not its whole share."""
        return max(each.virtual_time, self._now - _CREDIT / self._share(each))

    def _share(self, each: EnvironmentState) -> float:
        return each.share or 1.0  # a disconnected environment has share 0, but its groups remain and are admitted

    # --- slots

    def admit_waiting(self) -> list[QueueEntry]:
        """Give free slots to waiting groups and tickets. Return the groups that are too old; they get no slot."""
        stale: list[QueueEntry] = []
        if self.slots:
            while self.held < self.slots and (chosen := self._next_environment()):
                self._admit_one(chosen, stale)
        else:  # batches of sequences: tickets without limit; backlogs wait until a batch needs them
            for each in self.environments.values():
                while each.is_waiting() and each.waiters:
                    self._grant(each)
        self._answer_waiters()
        return stale

    def _admit_one(self, chosen: EnvironmentState, stale: list[QueueEntry]) -> None:
        if not chosen.backlog:
            return self._grant(chosen)
        entry = chosen.backlog.popleft()
        self.in_backlogs -= 1
        if self.is_stale(entry.oldest):
            stale.append(entry)
        else:
            self._start(entry)

    def _grant(self, chosen: EnvironmentState) -> None:
        waiter = chosen.waiters[0]
        entry = QueueEntry(self.next_id, chosen.id, writing=True)  # until its ticket is on disk
        self.next_id += 1
        self.entries[entry.id] = entry
        self._start(entry)
        self.playing[entry.order] = entry
        waiter.granted.append(entry)
        waiter.rollbacks = self.rollbacks
        if len(waiter.granted) >= waiter.count:
            chosen.waiters.popleft()
            waiter.answer.set_result(None)

    def _start(self, entry: QueueEntry) -> None:
        entry.order = self.next_order
        self.next_order += 1
        self.in_flight[entry.order] = entry

    def _answer_waiters(self) -> None:
        """Answer calls that got at least one ticket; the environment asks again for the rest."""
        for each in self.environments.values():
            while each.waiters and each.waiters[0].granted:
                waiter = each.waiters.popleft()
                if not waiter.answer.done():
                    waiter.answer.set_result(None)

    def remove(self, entry: QueueEntry) -> None:
        """Remove an entry and free its slot."""
        self.entries.pop(entry.id, None)
        if entry.order >= 0:
            self.in_flight.pop(entry.order, None)
            self.playing.pop(entry.order, None)

    def requeue(self, entries: Iterable[QueueEntry]) -> None:
        """Return leased entries to their old places in the order, each with a slot."""
        back = list(entries)
        gone = {entry.id for entry in back}
        self.unreleased = deque(entry for entry in self.unreleased if entry is None or entry.id not in gone)
        self.in_flight.update((entry.order, entry) for entry in back)
        self.in_flight = dict(sorted(self.in_flight.items()))

    # --- batches

    def ready(self, count: int) -> tuple[list[QueueEntry], list[QueueEntry]]:
        """Return the oldest `count` entries, or none if one is not ready; and the entries that are too old."""
        stale = self.admit_waiting()
        while old := [each for each in self._oldest(count) if each.place is not None and self.is_stale(each.oldest)]:
            for entry in old:
                del self.in_flight[entry.order]
            stale += old
            stale += self.admit_waiting()
        chosen = self._oldest(count)
        finished = len(chosen) == count and all(entry.place is not None for entry in chosen)
        return (chosen if finished else []), stale

    def _oldest(self, count: int) -> list[QueueEntry]:
        return list(islice(self.in_flight.values(), count))

    def ready_sequences(self, sequences: int) -> tuple[list[QueueEntry], list[QueueEntry]]:
        """Return the oldest groups that hold exactly `sequences` siblings, and the entries that are too old. Admits
        backlogs until the sum fits. No group is returned while a live environment has not put its minimum."""
        stale: list[QueueEntry] = self.admit_waiting()
        minima = {each.id: int(sequences * each.spec.min_share) for each in self.environments.values() if each.live}
        missing = Counter({id: most for id, most in minima.items() if most})
        pool: list[QueueEntry] = []
        reach, whole = 1, (1 << (sequences + 1)) - 1
        for entry in self._in_order(stale):
            pool.append(entry)
            reach |= (reach << entry.size) & whole
            missing[entry.environment] -= entry.size
            if reach >> sequences & 1 and all(size <= 0 for size in missing.values()):
                return _exactly(pool, sequences, minima), stale
            if len(pool) >= _LOOK_AHEAD:
                break
        return [], stale

    def _in_order(self, stale: list[QueueEntry]) -> Iterator[QueueEntry]:
        for entry in list(self.in_flight.values()):
            if entry.place is None:
                return
            if self.is_stale(entry.oldest):
                stale.append(entry)
                self.in_flight.pop(entry.order)
            else:
                yield entry
        while self.in_backlogs:
            before = self.next_order
            if chosen := self._next_environment(lines=True):
                self._admit_one(chosen, stale)
            if self.next_order > before:
                yield self.in_flight[before]

    def lease_out(self, entries: list[QueueEntry], expires: float) -> LeaseState:
        lease = LeaseState(self.next_lease, self.version, entries, expires)
        self.next_lease += 1
        self.leases[lease.id] = lease
        for entry in entries:
            del self.in_flight[entry.order]
        self.unreleased.extend(entries)
        return lease


def _exactly(pool: list[QueueEntry], sequences: int, minima: Mapping[int, int]) -> list[QueueEntry]:
    """Choose entries that sum to `sequences`: each environment's minimum first, then the oldest. Skips an entry only if
    the rest could not reach the sum with it."""
    due, first, left = Counter(minima), list[QueueEntry](), sequences
    for entry in pool:
        if due[entry.environment] > 0 and entry.size <= left:
            first.append(entry)
            due[entry.environment] -= entry.size
            left -= entry.size
    kept = {entry.id for entry in first}
    rest = _fill([entry for entry in pool if entry.id not in kept], left)
    if rest is None:  # no batch meets the minima with these sizes: take the oldest rather than none for ever
        first, rest = [], _fill(pool, sequences) or []
    return sorted([*first, *rest], key=lambda entry: entry.order)


def _fill(pool: list[QueueEntry], sequences: int) -> list[QueueEntry] | None:
    """Return the oldest entries that sum to `sequences`; None if no subset does."""
    suffix = [1] * (len(pool) + 1)
    whole = (1 << (sequences + 1)) - 1
    for number in range(len(pool) - 1, -1, -1):
        suffix[number] = suffix[number + 1] | (suffix[number + 1] << pool[number].size) & whole
    if not suffix[0] >> sequences & 1:
        return None
    chosen, left = list[QueueEntry](), sequences
    for number, entry in enumerate(pool):
        if entry.size <= left and suffix[number + 1] >> (left - entry.size) & 1:
            chosen.append(entry)
            left -= entry.size
    return chosen
