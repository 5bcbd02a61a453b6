"""Samples of earlier jobs, to be trained on again: a fair choice of all there were, and nothing to save.

Every sample has a rank: a hash of its content and the seed. The lowest ranks are kept, of each source at most its
share. So the choice is uniform, the same in every order of samples, and rebuilt at a start from the jobs that
were published. A sample that is sent twice is kept once.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from tandem.online.job_store import Job, JobStore
from tandem.online.messages import Sequence1
from tandem.spec.online_gates import ReplaySpec

T = TypeVar("T")
Groups = Sequence[Sequence[Sequence1]]

_REPLAYED = frozenset({"sft", "dpo"})
"""Recorded samples are as good as they were. What was sampled and rewarded grows stale with its version."""
_JOBS_READ = 100_000
_MOST_TOKENS = 500_000  # of one job


def content_key(value: Any) -> str:
    """Equal for equal JSON, whatever the order of its keys."""
    text = msgspec.json.encode(value, order="deterministic")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _ReplayEntry(Generic[T]):
    source: str
    item: T


class Reservoir(Generic[T]):
    """`per_source`: the share of the capacity that one source may have."""

    def __init__(self, capacity: int, *, per_source: float = 1.0, seed: int = 0) -> None:
        self._capacity, self._cap = capacity, max(1, math.floor(per_source * capacity))
        self._seed = seed
        self._ranks: list[tuple[int, str]] = []
        """Sorted; with each its key."""
        self._kept: dict[str, _ReplayEntry[T]] = {}
        self._by_source: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, key: str, source: str, item: T) -> bool:
        """False: it is there already, or ranks too high to be kept."""
        if key in self._kept:
            return False
        bisect.insort(self._ranks, (self._rank(key), key))
        self._kept[key] = _ReplayEntry(source, item)
        self._by_source[source] += 1
        gone = ""
        if self._by_source[source] > self._cap:
            gone = next(each for _, each in reversed(self._ranks) if self._kept[each].source == source)
        elif len(self._kept) > self._capacity:
            gone = self._ranks[-1][1]
        if gone:
            self._remove(gone)
        return gone != key

    def _remove(self, key: str) -> None:
        kept = self._kept.pop(key)
        self._ranks.pop(bisect.bisect_left(self._ranks, (self._rank(key), key)))
        self._by_source[kept.source] -= 1

    def draw(self, count: int, *, step: int, without: Collection[str] = ()) -> list[T]:
        """So many different ones, or all there are; the same for the same seed, step and content."""
        keys = [key for _, key in self._ranks if key not in without]
        rng = random.Random(f"{self._seed}|draw|{step}")
        return [self._kept[key].item for key in rng.sample(keys, min(count, len(keys)))]

    def _rank(self, key: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self._seed}|{key}".encode(), digest_size=8).digest())


class ReplayMemory:
    def __init__(self, spec: ReplaySpec, seed: int, store: JobStore, batch_size: int) -> None:
        self._spec, self._store, self._batch_size = spec, store, batch_size
        self._by_algorithm = {
            name: Reservoir[list[Sequence1]](spec.capacity, per_source=spec.per_source, seed=seed) for name in _REPLAYED
        }
        self._versions: defaultdict[str, set[int]] = defaultdict(set)
        """That each sample was taught to."""
        for job in store.jobs(_JOBS_READ, ["published"]):
            self.remember(job, store.groups(job.id))

    def __len__(self) -> int:
        return sum(len(each) for each in self._by_algorithm.values())

    def remember(self, job: Job, groups: Groups) -> None:
        """Of a job that was published."""
        reservoir = self._by_algorithm.get(job.teaching.algorithm)
        if reservoir is None or not self._spec.share or job.version is None:
            return
        for group in groups:
            key = content_key(group)
            self._versions[key].add(job.version)
            reservoir.add(key, job.source, list(group))

    def draw(self, job: Job, groups: Groups) -> tuple[list[list[Sequence1]], int]:
        """What the job trains on again, and in how many parts: each step takes one of them. What was taken back is not
        taught again: only samples of versions that this one comes from."""
        reservoir = self._by_algorithm.get(job.teaching.algorithm)
        if reservoir is None or not len(reservoir) or not self._spec.share:
            return [], 1
        fresh = min(len(groups), self._batch_size)
        a_step = max(1, math.floor(fresh * self._spec.share / (1 - self._spec.share) + 0.5))
        drawn: list[list[Sequence1]] = []
        left = _MOST_TOKENS
        line = self._store.line(job.parent if job.parent is not None else self._store.active)
        keys = {content_key(group) for group in groups}
        keys |= {key for key, versions in self._versions.items() if versions.isdisjoint(line)}
        for group in reservoir.draw(a_step * job.teaching.steps, step=job.number, without=keys):
            left -= sum(len(each.ids) for each in group)
            if left < 0:
                break
            drawn.append(group)
        return drawn, max(1, len(drawn) // a_step)
