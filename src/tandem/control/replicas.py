"""Where the replicas of deployments answer now, and the requests that they are answering. Their agents say every second
that they answer, and every request passes through this process. So nothing of it is in the database: a server that was
restarted knows it again within a second, and no request of the one before is under way any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tandem.control.counts import Counts

FRESH_MS = 10_000
"""How long a replica counts as there after its agent said so."""
COMES_BACK_MS = 10_000
"""How long a replica that has just begun waits longer: a client that was told to ask again is on its way."""
DRAIN_MS = 300_000
"""How long a replica that should end may go on answering what it has begun."""


@dataclass(frozen=True, slots=True)
class Replica:
    run: str
    attempt: str
    url: str
    at: int
    served: Mapping[str, str]
    """The models that it has, by `weights_of`: empty, or why one is refused."""

    def why_not(self, model: str) -> str | None:
        """Return why it does not have a model; None if it has it."""
        return self.served.get(model, "its replica is loading it") or None


@dataclass(frozen=True, slots=True)
class OnlineServer:
    """An online server that the operator has named. It is started and ended by others."""

    url: str
    token: str = field(repr=False)
    model: str
    """The name that it has for its model."""


@dataclass
class Replicas:
    """Replicas by the run that serves."""

    _by_run: dict[str, Replica] = field(default_factory=dict[str, Replica])
    _under_way: Counter[str] = field(default_factory=Counter[str])
    _drains: dict[str, int] = field(default_factory=dict[str, int])
    """Since when a run waits for its requests."""
    _used: dict[str, int] = field(default_factory=dict[str, int])
    """When a request was under way last."""
    _counts: dict[tuple[str, int], Counts] = field(default_factory=dict[tuple[str, int], Counts])
    """By deployment and revision, since they were taken."""
    _answered: set[str] = field(default_factory=set[str])
    """Runs whose replica has answered since it was deployed or waked."""
    _ending: dict[str, str] = field(default_factory=dict[str, str])
    """The attempt that was told to end, by run."""

    def seen(self, run: str, attempt: str, url: str, now: int, served: Mapping[str, str]) -> None:
        before = self._by_run.get(run)
        if before is None or before.attempt != attempt:
            self._used[run] = now + COMES_BACK_MS
        self._answered.add(run)
        self._by_run[run] = Replica(run, attempt, url, now, served)

    def lost(self, replica: Replica) -> None:
        """Forget a replica that did not answer, until its agent says again that it does."""
        if self._by_run.get(replica.run) == replica:
            del self._by_run[replica.run]

    def waked(self, run: str) -> None:
        self._answered.discard(run)

    def has_answered(self, run: str) -> bool:
        """Return whether a replica has been there since the run was deployed or waked. A request that waited before
        that is no failure of its weights."""
        return run in self._answered

    def find(self, run: str, now: int, model: str = "") -> Replica | None:
        """Return the replica of a run; None if it does not answer, was told to end, or does not have this model."""
        found = self._by_run.get(run)
        if found is None or now - found.at > FRESH_MS or self._ending.get(run) == found.attempt:
            return None
        return found if not model or found.why_not(model) is None else None

    def why_not(self, run: str, model: str) -> str:
        """Return why the replica of a run does not have a model, as far as its agent said so."""
        found = self._by_run.get(run)
        return (found.why_not(model) if found else "") or ""

    def idle_ms(self, run: str, now: int) -> int | None:
        """Return for how long no request was under way; None if the replica does not answer."""
        if self.find(run, now) is None:
            return None
        if self._under_way[run]:
            self._used[run] = now
        return now - self._used.setdefault(run, now)

    @contextmanager
    def asked(self, run: str) -> Generator[None]:
        """Count a request as under way."""
        self._under_way[run] += 1
        self._used.pop(run, None)
        try:
            yield
        finally:
            self._under_way[run] -= 1
            if not self._under_way[run]:
                del self._under_way[run]

    def count(self, deployment: str, n: int, seconds: float, *, failed: bool) -> None:
        """Count an answer of a revision."""
        self._counts.setdefault((deployment, n), Counts()).add(seconds, failed=failed)

    def take_counts(self) -> dict[tuple[str, int], Counts]:
        taken, self._counts = self._counts, {}
        return taken

    def may_end(self, run: str, attempt: str, now: int) -> bool:
        """Return whether the run that is asked to stop may do so now: none of its requests is under way, or DRAIN_MS is
        over. Then it gets no further request."""
        since = self._drains.setdefault(run, now)
        if self._under_way[run] and now - since <= DRAIN_MS:
            return False
        del self._drains[run]
        if run in self._by_run:
            self._ending[run] = attempt
        return True
