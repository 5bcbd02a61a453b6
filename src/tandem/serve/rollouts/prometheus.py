"""The rollout service's numbers for Prometheus, read from the queue when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tandem.rollout.queue.queue import RolloutQueue

_LAGS = (0, 1, 2, 4, 8, 16, 32)
_GAUGES = {
    "queued": "Groups that wait to be taken.",
    "playing": "Tickets whose group is still to come.",
    "slots": "Slots in all.",
    "held": "Slots that are held.",
    "leases": "Leases that are neither acknowledged nor lapsed.",
    "leased": "Groups under lease.",
}


def registry(queue: RolloutQueue) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(_Numbers(queue))
    return made


class _Numbers(Collector):
    def __init__(self, queue: RolloutQueue) -> None:
        self.queue = queue

    def collect(self) -> Iterator[Any]:
        status = self.queue.status()
        for name, help in _GAUGES.items():
            yield GaugeMetricFamily(f"tandem_rollouts_{name}", help, status["queue"][name])
        yield GaugeMetricFamily("tandem_rollouts_version", "The trainer's.", self.queue.version)
        yield GaugeMetricFamily("tandem_rollouts_stored_bytes", "Of payload files.", status["stored"]["bytes"])
        for name, help in {
            "put": "Groups stored.", "taken": "Groups handed out.", "acked": "Groups acknowledged.",
            "sequences": "Trajectories handed out.", "tokens": "Tokens handed out.",
            "duplicate_posts": "Atropos posts that repeated another.",
            "batches_again": "Batches that a trainer left unread.",
            "tokens_stamped": "Trained tokens of Atropos posts whose version the gateway proved.",
            "tokens_unknown": "Trained tokens of Atropos posts whose version nothing proves.",
            "unstamped_posts": "Atropos posts that the gateway did not answer for.",
        }.items():  # fmt: skip
            yield CounterMetricFamily(f"tandem_rollouts_{name}", help, status["totals"].get(name, 0))
        dropped = CounterMetricFamily("tandem_rollouts_dropped", "Groups that nobody trains on.", labels=["reason"])
        for reason, number in status["dropped"].items():
            dropped.add_metric([reason], number)
        yield dropped
        yield self._lags()
        yield from _environments(status["environments"])

    def _lags(self) -> Any:
        lags = self.queue.stats.lags
        below = [(str(float(most)), float(sum(n for lag, n in lags.items() if lag <= most))) for most in _LAGS]
        everything = float(sum(lags.values()))
        family = HistogramMetricFamily("tandem_rollouts_lag", "Versions between a group handed out and the trainer.")
        family.add_metric([], [*below, ("+Inf", everything)], sum(lag * n for lag, n in lags.items()))
        return family


def _environments(rows: list[dict[str, Any]]) -> Iterator[Any]:
    for name, help in {
        "queued": "Groups of an environment that wait.", "playing": "Its tickets that are played.",
        "share": "Its part of what is let in.",
    }.items():  # fmt: skip
        family = GaugeMetricFamily(f"tandem_rollouts_environment_{name}", help, labels=["environment"])
        for row in rows:
            family.add_metric([row["name"]], row[name])
        yield family
