"""Where the replicas of deployments answer now. Their agents say so every second, so nothing of it is in the database:
a server that was restarted knows it again within a second."""

from __future__ import annotations

from dataclasses import dataclass, field

FRESH_MS = 10_000
"""How long a replica counts as there after its agent said so."""


@dataclass(frozen=True, slots=True)
class Replica:
    attempt: str
    url: str
    at: int


@dataclass
class Replicas:
    _by_run: dict[str, Replica] = field(default_factory=dict[str, Replica])

    def seen(self, run: str, attempt: str, url: str, now: int) -> None:
        self._by_run[run] = Replica(attempt, url, now)

    def lost(self, run: str) -> None:
        """Forget a replica that did not answer, until its agent says again that it does."""
        self._by_run.pop(run, None)

    def find(self, run: str, now: int) -> Replica | None:
        found = self._by_run.get(run)
        return found if found is not None and now - found.at <= FRESH_MS else None
