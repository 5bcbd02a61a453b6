"""Earlier samples, so that a job trains on some of them again: a choice from the jobs that were published.

Nothing of it is stored: at a start it is rebuilt from the job store, and is the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from tandem.online.job_store import Job, JobStore
from tandem.online.messages import Sequence1
from tandem.online.sample_replay import Reservoir, content_key
from tandem.spec.online_gates import ReplaySpec

Groups = Sequence[Sequence[Sequence1]]

_REPLAYED = frozenset({"sft", "dpo"})
"""Recorded samples are as good as they were. What was sampled and rewarded grows stale with its version."""
_JOBS_READ = 100_000
_MOST_TOKENS = 500_000  # of one job


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
