"""Rewards to credit. G siblings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from operator import attrgetter

from tandem.protocols import Credit
from tandem.types import Group, Trajectory

Advantages = Callable[[Sequence[Group]], list[list[float]]]
"""Of a step's groups: one number for each trajectory of each group."""


def has_tokens(group: Group) -> bool:
    return any(trajectory.num_trained for trajectory in group)


def has_signal(group: Group) -> bool:
    """Siblings with equal rewards have no advantage over each other, whatever their shaping."""
    return _differ(group) and has_tokens(group)


def compared(
    trajectories: Sequence[Trajectory], shaping: Callable[[Trajectory], float] = attrgetter("shaping")
) -> list[float]:
    """Rewards with their shaping, but without it where all rewards are equal.

    Those that are equally right or wrong would otherwise be compared by their shaping alone (by their lengths, say),
    and whatever divides by the spread would blow that up to full size.
    """
    if not _differ(trajectories):
        return [trajectory.reward for trajectory in trajectories]
    return [trajectory.reward + shaping(trajectory) for trajectory in trajectories]


def _differ(trajectories: Sequence[Trajectory]) -> bool:
    return len({trajectory.reward for trajectory in trajectories}) > 1


def centred(rewards_G: Sequence[float]) -> list[float]:
    if len(set(rewards_G)) == 1:
        return [0.0] * len(rewards_G)  # exactly: a mean of equal rewards may be off by a rounding
    mean = statistics.fmean(rewards_G)
    return [reward - mean for reward in rewards_G]


def standardised(rewards_G: Sequence[float], spread_floor: float) -> list[float]:
    spread = statistics.pstdev(rewards_G) + spread_floor
    return [advantage / spread for advantage in centred(rewards_G)]


def by_group(advantages: Callable[[Sequence[float]], list[float]]) -> Advantages:
    """For algorithms that compare siblings only, and only their rewards and shaping."""
    return lambda groups: [advantages(compared(group)) for group in groups]


def spread_over_tokens(group: Group, advantages_G: Sequence[float], clip: float) -> Credit:
    """Every trained token gets its trajectory's advantage, cut to within plus and minus `clip`; 0 cuts nothing."""
    if clip:
        advantages_G = [max(-clip, min(clip, advantage)) for advantage in advantages_G]
    return [[advantage] * trajectory.num_trained for trajectory, advantage in zip(group, advantages_G, strict=True)]
