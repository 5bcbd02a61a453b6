"""Prometheus metrics of the rollout service, read from the queue at each scrape."""

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
    "playing": "Tickets whose group has not arrived.",
    "slots": "Slots in total.",
    "held": "Slots that are held.",
    "leases": "Open leases.",
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
        yield GaugeMetricFamily("tandem_rollouts_version", "The trainer's version.", self.queue.version)
        yield GaugeMetricFamily("tandem_rollouts_stored_bytes", "Bytes of payload files.", status["stored"]["bytes"])
        for name, help in {
            "put": "Groups stored.", "taken": "Groups handed out.", "acked": "Groups acknowledged.",
            "sequences": "Trajectories handed out.", "tokens": "Tokens handed out.",
            "duplicate_posts": "Atropos posts that repeated another.",
            "batches_again": "Batches sent again because a trainer did not read them.",
            "tokens_stamped": "Trained tokens of Atropos posts whose version the gateway proved.",
            "tokens_unknown": "Trained tokens of Atropos posts of unknown version.",
            "unstamped_posts": "Atropos posts that the gateway did not answer for.",
        }.items():  # fmt: skip
            yield CounterMetricFamily(f"tandem_rollouts_{name}", help, status["totals"].get(name, 0))
        dropped = CounterMetricFamily(
            "tandem_rollouts_dropped", "Groups dropped without being trained on.", labels=["reason"]
        )
        for reason, number in status["dropped"].items():
            dropped.add_metric([reason], number)
        yield dropped
        yield self._lags()
        yield from _environments(status["environments"])

    def _lags(self) -> Any:
        lags = self.queue.stats.lags
        below = [(str(float(most)), float(sum(n for lag, n in lags.items() if lag <= most))) for most in _LAGS]
        everything = float(sum(lags.values()))
        family = HistogramMetricFamily("tandem_rollouts_lag", "Lag in versions of the groups handed out.")
        family.add_metric([], [*below, ("+Inf", everything)], sum(lag * n for lag, n in lags.items()))
        return family


def _environments(rows: list[dict[str, Any]]) -> Iterator[Any]:
    for name, help in {
        "queued": "Groups of an environment that wait.", "playing": "Its open tickets.",
        "share": "Its share of the admitted groups.",
    }.items():  # fmt: skip
        family = GaugeMetricFamily(f"tandem_rollouts_environment_{name}", help, labels=["environment"])
        for row in rows:
            family.add_metric([row["name"]], row[name])
        yield family
