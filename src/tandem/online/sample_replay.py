"""Choose samples of earlier jobs to train on again: a uniform choice that needs no file of its own.

Every sample has a rank: a hash of its content and the seed. The lowest ranks stay, of each source at most its share.
So the choice is uniform and does not depend on the order of samples. At a start it is rebuilt from the published jobs.
A sample that is sent twice counts once.
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

from tandem.online.job_store import JobStore, LearningJob
from tandem.online.messages import Sequence1
from tandem.spec.online_gates import ReplaySpec

T = TypeVar("T")
Groups = Sequence[Sequence[Sequence1]]

_REPLAYED = frozenset({"sft", "dpo"})
"""Recorded samples stay valid. Samples that the model made and that were rewarded grow stale with their version."""
_JOBS_READ = 100_000
_MAX_TOKENS = 500_000  # replayed in one job


def content_key(value: Any) -> str:
    """Return a hash of a JSON value; the order of its keys does not matter."""
    text = msgspec.json.encode(value, order="deterministic")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _ReplayEntry(Generic[T]):
    source: str
    item: T


class Reservoir(Generic[T]):
    """A uniform choice of at most `capacity` items. `per_source`: the largest share of it for items of one source."""

    def __init__(self, capacity: int, *, per_source: float = 1.0, seed: int = 0) -> None:
        self._capacity, self._source_capacity = capacity, max(1, math.floor(per_source * capacity))
        self._seed = seed
        self._ranks: list[tuple[int, str]] = []
        """Rank and key, sorted."""
        self._entries: dict[str, _ReplayEntry[T]] = {}
        self._by_source: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: str, source: str, item: T) -> bool:
        """Add an item. Return False if it is there already, or its rank is too high."""
        if key in self._entries:
            return False
        bisect.insort(self._ranks, (self._rank(key), key))
        self._entries[key] = _ReplayEntry(source, item)
        self._by_source[source] += 1
        removed = ""
        if self._by_source[source] > self._source_capacity:
            removed = next(each for _, each in reversed(self._ranks) if self._entries[each].source == source)
        elif len(self._entries) > self._capacity:
            removed = self._ranks[-1][1]
        if removed:
            self._remove(removed)
        return removed != key

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key)
        self._ranks.pop(bisect.bisect_left(self._ranks, (self._rank(key), key)))
        self._by_source[entry.source] -= 1

    def draw(self, count: int, *, step: int, without: Collection[str] = ()) -> list[T]:
        """Return `count` different items, or all if there are fewer; the same for the same seed, step and content."""
        keys = [key for _, key in self._ranks if key not in without]
        rng = random.Random(f"{self._seed}|draw|{step}")
        return [self._entries[key].item for key in rng.sample(keys, min(count, len(keys)))]

    def _rank(self, key: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self._seed}|{key}".encode(), digest_size=8).digest())


class ReplayMemory:
    """The samples of published jobs, by algorithm."""

    def __init__(self, spec: ReplaySpec, seed: int, store: JobStore, batch_size: int) -> None:
        self._spec, self._store, self._batch_size = spec, store, batch_size
        self._by_algorithm = {
            name: Reservoir[list[Sequence1]](spec.capacity, per_source=spec.per_source, seed=seed) for name in _REPLAYED
        }
        self._versions: defaultdict[str, set[int]] = defaultdict(set)
        """By sample: the versions that were trained on it."""
        for job in store.jobs(_JOBS_READ, ["published"]):
            self.remember(job, store.groups(job.id))

    def __len__(self) -> int:
        return sum(len(each) for each in self._by_algorithm.values())

    def remember(self, job: LearningJob, groups: Groups) -> None:
        """Add the samples of a published job."""
        reservoir = self._by_algorithm.get(job.teaching.algorithm)
        if reservoir is None or not self._spec.share or job.version is None:
            return
        for group in groups:
            key = content_key(group)
            self._versions[key].add(job.version)
            reservoir.add(key, job.source, list(group))

    def draw(self, job: LearningJob, groups: Groups) -> tuple[list[list[Sequence1]], int]:
        """Return the groups that the job replays, and in how many parts: each step takes one part. Only samples of the
        job's ancestor versions are drawn: those of rolled-back versions are not trained on again."""
        reservoir = self._by_algorithm.get(job.teaching.algorithm)
        if reservoir is None or not len(reservoir) or not self._spec.share:
            return [], 1
        fresh = min(len(groups), self._batch_size)
        per_step = max(1, math.floor(fresh * self._spec.share / (1 - self._spec.share) + 0.5))
        drawn: list[list[Sequence1]] = []
        tokens_left = _MAX_TOKENS
        lineage = self._store.lineage(job.parent if job.parent is not None else self._store.active)
        keys = {content_key(group) for group in groups}
        keys |= {key for key, versions in self._versions.items() if versions.isdisjoint(lineage)}
        for group in reservoir.draw(per_step * job.teaching.steps, step=job.number, without=keys):
            tokens_left -= sum(len(each.ids) for each in group)
            if tokens_left < 0:
                break
            drawn.append(group)
        return drawn, max(1, len(drawn) // per_step)
