"""Statistics of the rollout queue for people: counts, rates, and the lag of the groups handed out."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tandem.rollout.queue.state import EnvironmentState, QueueState
from tandem.rollout.queue.types import QueueLimits, Taken
from tandem.rollout.queue.validation import why_no_batch

_WINDOW_S = 60


class QueueStats:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.started = clock, time.time()
        self.totals: Counter[str] = Counter()
        """Since this process began: `put`, `dropped`, `taken`, `acked` in groups; `sequences` and `tokens` taken."""
        self.dropped: Counter[str] = Counter()
        """By reason."""
        self.lags: Counter[int] = Counter()
        """Groups handed out, by lag in versions."""
        self.taken_by: Counter[int] = Counter()
        self._recent: deque[tuple[int, Counter[str]]] = deque(maxlen=_WINDOW_S)

    def count(self, what: str, number: int, *, reason: str = "") -> None:
        self.totals[what] += number
        if what == "dropped":
            self.dropped[reason] += number
        second = int(self._clock())
        if not self._recent or self._recent[-1][0] != second:
            self._recent.append((second, Counter()))
        self._recent[-1][1][what] += number

    def took(self, group: Taken) -> None:
        self.count("taken", 1)
        self.count("sequences", group.size)
        self.count("tokens", group.tokens)
        self.lags[group.lag] += 1
        self.taken_by[group.environment] += 1

    def rates(self) -> dict[str, float]:
        """Return counts per second over the last minute."""
        now = int(self._clock())
        recent = [(second, counts) for second, counts in self._recent if second > now - _WINDOW_S]
        seconds = max(1, now - recent[0][0] + 1) if recent else 1
        total: Counter[str] = Counter()
        for _, counts in recent:
            total.update(counts)
        return {f"{what}_per_s": round(total[what] / seconds, 3) for what in ("put", "taken", "dropped", "tokens")}

    def environments(self, which: Iterable[EnvironmentState], state: QueueState) -> list[dict[str, Any]]:
        """Return a row for each environment in `which`. One pass over the queue serves all of them."""
        playing: Counter[int] = Counter(entry.environment for entry in state.playing.values())
        ready: dict[int, list[int]] = {}
        for entry in state.in_flight.values():
            if entry.place is not None:
                ready.setdefault(entry.environment, []).append(entry.size)
        return [self._environment(each, ready.get(each.id, []), playing[each.id]) for each in which]

    def _environment(self, each: EnvironmentState, ready: list[int], playing: int) -> dict[str, Any]:
        sizes = [*(e.size for e in each.backlog), *ready]
        return {
            "id": each.id,
            "name": each.name,
            "weight": each.spec.weight,
            "min_share": each.spec.min_share,
            "share": round(each.share, 6),
            "connected": each.connected,
            "silent": each.silent,
            "silent_s": round(max(0.0, self._clock() - each.seen), 3),
            "queued": len(sizes),
            "sequences": sum(sizes),
            "largest": max(sizes, default=0),
            "playing": playing,
            "admitted": each.admitted,
            "taken": self.taken_by[each.id],
            "counts": dict(each.counts),
        }

    def status(self, state: QueueState, limits: QueueLimits, stored: Mapping[str, Any]) -> dict[str, Any]:
        trainer = state.trainer
        lags = Counter(state.lag(entry) for entry in state.in_flight.values() if entry.place is not None)
        return {
            "trainer": None
            if trainer is None
            else {"run_id": trainer.run_id, "epoch": state.epoch, "version": state.version, "max_lag": trainer.max_lag},
            "queue": {
                "queued": state.queued,
                "most": limits.max_queued,
                "playing": len(state.playing),
                "slots": state.slots,
                "held": state.held,
                "leases": len(state.leases),
                "leased": sum(len(lease.entries) for lease in state.leases.values()),
                "lag": {str(lag): number for lag, number in sorted(lags.items())},
                "why_no_batch": why_no_batch(state),
            },
            "taken_lag": {str(lag): number for lag, number in sorted(self.lags.items())},
            "totals": dict(self.totals),
            "rates": self.rates(),
            "dropped": dict(self.dropped),
            "environments": self.environments(state.environments.values(), state),
            "stored": dict(stored),
            "uptime_s": round(time.time() - self.started, 1),
        }
