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
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


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
