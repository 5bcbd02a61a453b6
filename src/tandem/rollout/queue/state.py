"""The rollout queue in memory: who waits, in which order, and which groups make the next batch. No disk, no clock.

A group that was put without a ticket waits in its environment's line. Tickets and lines compete for slots: whichever
environment is furthest behind its share comes next. What was let in has an order, and is handed out by it.
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

_LOOK_AHEAD = 4096  # groups that are tried when a batch must hold an exact number of sequences
_CREDIT = 16  # how far an environment that could not ask may be behind, in groups


@dataclass(slots=True)
class QueueEntry:
    """A group, or the ticket for one."""

    id: int
    environment: int
    order: int = -1
    """-1: in its environment's line."""
    place: SegmentPlace | None = None
    """None: it is being played."""
    size: int = 0
    tokens: int = 0
    oldest: int = NO_VERSION
    newest: int = NO_VERSION
    since: float = 0.0
    """Monotonic: when its ticket was given, or when it was put without one."""
    busy: bool = False
    """It is on its way to the disk: it is not to lapse now."""


@dataclass(slots=True)
class WaitingEnvironment:
    """An environment that waits for tickets."""

    count: int
    answer: asyncio.Future[None]
    backs: int = 0
    """Of the state, when tickets were granted."""
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
    behind: float = 0.0
    """Virtual time: goes up by 1 / share with each group let in; the lowest comes next."""
    admitted: int = 0
    writing: int = 0
    """Calls that write groups of it."""
    line: deque[QueueEntry] = field(default_factory=deque[QueueEntry])
    asking: deque[WaitingEnvironment] = field(default_factory=deque[WaitingEnvironment])
    counts: Counter[str] = field(default_factory=Counter[str])
    """`put`, and drops by reason."""

    @property
    def live(self) -> bool:
        return self.connected and not self.silent

    @property
    def usual_size(self) -> int:
        """Siblings of its groups, as far as it said so; 0 if it did not."""
        said = self.spec.group_size or self.spec.extra.get("group_size")  # Atropos's may send other sizes, too
        return said if isinstance(said, int) else 0

    def waits(self) -> bool:
        while self.asking and (self.asking[0].answer.done() or not self.live):
            gone = self.asking.popleft()
            if not gone.answer.done():
                gone.answer.set_result(None)
        return bool(self.line or self.asking)


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
        """Of this run; numbers of runs before are never given again, so that whoever is left of one is not known."""
        self.backs = 0
        """How often a trainer went back to an earlier version."""
        self.coming = 0
        """Groups without a ticket that are on their way to the disk."""
        self.entries: dict[int, QueueEntry] = {}
        """By id: everything that is not forgotten yet."""
        self.flight: dict[int, QueueEntry] = {}
        """By order: let in and not taken."""
        self.playing: dict[int, QueueEntry] = {}
        """Those of them whose group is still to come."""
        self.leases: dict[int, LeaseState] = {}
        self.acked: set[int] = set()
        """Leases that were acknowledged whole; any other that is not held lapsed."""
        self.holding: deque[QueueEntry | None] = deque()
        """Taken and not released, oldest take first; None for one that was acknowledged before a restart."""
        self.in_lines = 0
        self.dropped_in_a_row = 0
        self._now = 0.0

    # --- counting

    @property
    def slots(self) -> int:
        return self.trainer.slots if self.trainer else 0

    @property
    def held(self) -> int:
        return len(self.flight) + len(self.holding)

    @property
    def queued(self) -> int:
        return len(self.entries) - len(self.playing) - sum(len(lease.entries) for lease in self.leases.values())

    def lag(self, entry: QueueEntry) -> int:
        return 0 if entry.oldest == NO_VERSION else max(0, self.version - entry.oldest)

    def is_stale(self, oldest: int) -> bool:
        limit = self.trainer.max_lag if self.trainer else -1
        return limit >= 0 and oldest != NO_VERSION and self.version - oldest > limit

    def is_ahead(self, newest: int) -> bool:
        """Of all that an honest engine can hold. A trainer holds max_lag + 1 batches at most before it calls again,
        and says its version then; what each of them makes may be published before."""
        limit = self.trainer.max_lag if self.trainer else -1
        return limit >= 0 and newest > self.version + max(limit, 1) + 1

    def undone(self, version: int) -> list[QueueEntry]:
        """What was played by versions that a trainer who goes back to `version` never made, leases included; of what
        is being played nobody knows yet. What is on its way to the disk is asked when it arrives."""
        leased = [e for lease in self.leases.values() for e in lease.entries if e.newest > version]
        waiting = [e for e in self.flight.values() if not e.busy and (e.place is None or e.newest > version)]
        return leased + waiting + [e for each in self.environments.values() for e in each.line if e.newest > version]

    def leave_lines(self, goes: Callable[[QueueEntry], bool]) -> list[QueueEntry]:
        gone: list[QueueEntry] = []
        for each in self.environments.values():
            if found := [entry for entry in each.line if goes(entry)]:
                each.line = deque(entry for entry in each.line if not goes(entry))
                gone += found
        self.in_lines -= len(gone)
        return gone

    # --- shares

    def share_out(self) -> None:
        """Each live environment's part: by weight, but no less than its minimum."""
        for each in self.environments.values():
            each.share = 0.0
            if not each.admitted and not each.behind:
                each.behind = self._now  # a newcomer begins now: it was not away, and has no credit
        # The highest minimum for its weight first. Once a part by weight is enough for one, it is for all after it.
        live = [each for each in self.environments.values() if each.live]
        live.sort(key=lambda each: each.spec.min_share / each.spec.weight, reverse=True)
        weights = list(accumulate(each.spec.weight for each in reversed(live)))  # of it and all after it; last first
        rest = 1.0
        for each in live:
            each.share = max(each.spec.min_share, rest * each.spec.weight / weights.pop(), 1e-6)
            rest = max(0.0, rest - each.share)

    def _next_environment(self, *, lines: bool = False) -> EnvironmentState | None:
        waiting = [each for each in self.environments.values() if (each.line if lines else each.waits())]
        if not waiting:
            return None
        chosen = min(waiting, key=lambda each: (self._turn(each), each.id))
        chosen.behind = self._turn(chosen)
        self._now = max(self._now, chosen.behind)
        chosen.behind += self._cost(chosen) / self._share(chosen)
        chosen.admitted += 1
        return chosen

    def _cost(self, each: EnvironmentState) -> int:
        """Of what comes next: batches that are counted in sequences are shared by sequences."""
        by_sequences = self.trainer is not None and self.trainer.sequences_per_step
        return each.line[0].size if by_sequences and each.line else 1

    def _turn(self, each: EnvironmentState) -> float:
        """Whoever was away comes back with some credit, and not with all that it did not use."""
        return max(each.behind, self._now - _CREDIT / self._share(each))

    def _share(self, each: EnvironmentState) -> float:
        return each.share or 1.0  # of one that left, groups may remain: they are let in as if it were alone

    # --- slots

    def let_in(self) -> list[QueueEntry]:
        """Gives free slots away. What turned out to be too old is returned, and left out."""
        stale: list[QueueEntry] = []
        if self.slots:
            while self.held < self.slots and (chosen := self._next_environment()):
                self._let_one_in(chosen, stale)
        else:  # batches of sequences: tickets as they are asked for; lines wait until a batch needs them
            for each in self.environments.values():
                while each.waits() and each.asking:
                    self._grant(each)
        self._answer()
        return stale

    def _let_one_in(self, chosen: EnvironmentState, stale: list[QueueEntry]) -> None:
        if not chosen.line:
            return self._grant(chosen)
        entry = chosen.line.popleft()
        self.in_lines -= 1
        if self.is_stale(entry.oldest):
            stale.append(entry)
        else:
            self._start(entry)

    def _grant(self, chosen: EnvironmentState) -> None:
        asking = chosen.asking[0]
        entry = QueueEntry(self.next_id, chosen.id, busy=True)  # until its ticket is on the disk
        self.next_id += 1
        self.entries[entry.id] = entry
        self._start(entry)
        self.playing[entry.order] = entry
        asking.granted.append(entry)
        asking.backs = self.backs
        if len(asking.granted) >= asking.count:
            chosen.asking.popleft()
            asking.answer.set_result(None)

    def _start(self, entry: QueueEntry) -> None:
        entry.order = self.next_order
        self.next_order += 1
        self.flight[entry.order] = entry

    def _answer(self) -> None:
        """Whoever has a ticket goes and plays it; the rest of what it asked for it asks for again."""
        for each in self.environments.values():
            while each.asking and each.asking[0].granted:
                asking = each.asking.popleft()
                if not asking.answer.done():
                    asking.answer.set_result(None)

    def free(self, entry: QueueEntry) -> None:
        """It leaves, wherever it is, and its slot with it."""
        self.entries.pop(entry.id, None)
        if entry.order >= 0:
            self.flight.pop(entry.order, None)
            self.playing.pop(entry.order, None)

    def come_back(self, entries: Iterable[QueueEntry]) -> None:
        """From a lease that lapsed: to their old places in the order, with a slot each."""
        back = list(entries)
        gone = {entry.id for entry in back}
        self.holding = deque(entry for entry in self.holding if entry is None or entry.id not in gone)
        self.flight.update((entry.order, entry) for entry in back)
        self.flight = dict(sorted(self.flight.items()))

    # --- batches

    def ready(self, count: int) -> tuple[list[QueueEntry], list[QueueEntry]]:
        """The oldest `count`, or nothing yet; and what is too old, to be dropped."""
        stale = self.let_in()
        while old := [each for each in self._oldest(count) if each.place is not None and self.is_stale(each.oldest)]:
            for entry in old:
                del self.flight[entry.order]
            stale += old
            stale += self.let_in()
        chosen = self._oldest(count)
        finished = len(chosen) == count and all(entry.place is not None for entry in chosen)
        return (chosen if finished else []), stale

    def _oldest(self, count: int) -> list[QueueEntry]:
        return list(islice(self.flight.values(), count))

    def ready_sequences(self, sequences: int) -> tuple[list[QueueEntry], list[QueueEntry]]:
        """Groups that hold exactly so many siblings, the oldest that can; lines are let in until they do. None while
        an environment that lives has not put its minimum."""
        stale: list[QueueEntry] = self.let_in()
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
        for entry in list(self.flight.values()):
            if entry.place is None:
                return
            if self.is_stale(entry.oldest):
                stale.append(entry)
                self.flight.pop(entry.order)
            else:
                yield entry
        while self.in_lines:
            before = self.next_order
            if chosen := self._next_environment(lines=True):
                self._let_one_in(chosen, stale)
            if self.next_order > before:
                yield self.flight[before]

    def lend(self, entries: list[QueueEntry], expires: float) -> LeaseState:
        lease = LeaseState(self.next_lease, self.version, entries, expires)
        self.next_lease += 1
        self.leases[lease.id] = lease
        for entry in entries:
            del self.flight[entry.order]
        self.holding.extend(entries)
        return lease


def _exactly(pool: list[QueueEntry], sequences: int, minima: Mapping[int, int]) -> list[QueueEntry]:
    """Of those that add up to it, the ones with the oldest, each environment's minimum first: an entry is left out only
    if the rest would not fit."""
    due, first, left = Counter(minima), list[QueueEntry](), sequences
    for entry in pool:
        if due[entry.environment] > 0 and entry.size <= left:
            first.append(entry)
            due[entry.environment] -= entry.size
            left -= entry.size
    kept = {entry.id for entry in first}
    rest = _fill([entry for entry in pool if entry.id not in kept], left)
    if rest is None:  # groups of these sizes meet the minima in no batch: the oldest, then, rather than none for ever
        first, rest = [], _fill(pool, sequences) or []
    return sorted([*first, *rest], key=lambda entry: entry.order)


def _fill(pool: list[QueueEntry], sequences: int) -> list[QueueEntry] | None:
    """The oldest that add up to it; None if none do."""
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
