"""What groups say of the policy that played them: numbers for the curves."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from tandem.types import Group, Metrics


def of_groups(groups: Sequence[Group]) -> Metrics:
    metrics: Metrics = {"groups/played": float(len(groups))}
    played = [trajectory for group in groups for trajectory in group]
    if not played:
        return metrics
    rewards = [trajectory.reward for trajectory in played]
    metrics["reward/mean"] = statistics.fmean(rewards)
    metrics["reward/std"] = statistics.pstdev(rewards)
    if any(trajectory.shaping for trajectory in played):
        metrics["reward/shaping"] = statistics.fmean(trajectory.shaping for trajectory in played)
    metrics["tokens/sampled"] = float(sum(trajectory.num_trained for trajectory in played))
    metrics["tokens/per_sample"] = statistics.fmean(trajectory.num_trained for trajectory in played)
    metrics["episode/truncated"] = statistics.fmean(trajectory.status == "truncated" for trajectory in played)
    if any(trajectory.thinking_tokens or trajectory.unclosed for trajectory in played):
        metrics["thinking/tokens"] = statistics.fmean(trajectory.thinking_tokens for trajectory in played)
        metrics["thinking/unclosed"] = statistics.fmean(trajectory.unclosed for trajectory in played)
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in played:
        for name, value in trajectory.metrics.items():
            by_name[name].append(value)
    return metrics | {f"env/{name}": statistics.fmean(values) for name, values in sorted(by_name.items())}
