"""Turn rewards into credit. G siblings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from operator import attrgetter

from tandem.protocols import Credit
from tandem.types import Group, Trajectory

Advantages = Callable[[Sequence[Group]], list[list[float]]]
"""Computes one number for each trajectory of each of a step's groups."""


def has_tokens(group: Group) -> bool:
    return any(trajectory.num_trained for trajectory in group)


def has_signal(group: Group) -> bool:
    """Return whether a group's rewards differ. With equal rewards there is no advantage, whatever the shaping."""
    return _differ(group) and has_tokens(group)


def compared(
    trajectories: Sequence[Trajectory], shaping: Callable[[Trajectory], float] = attrgetter("shaping")
) -> list[float]:
    """Return rewards plus shaping, but without shaping if all rewards are equal.

    Otherwise equally good siblings would be compared by shaping only (such as their lengths), and dividing by the
    standard deviation would scale that up to full size.
    """
    if not _differ(trajectories):
        return [trajectory.reward for trajectory in trajectories]
    return [trajectory.reward + shaping(trajectory) for trajectory in trajectories]


def _differ(trajectories: Sequence[Trajectory]) -> bool:
    return len({trajectory.reward for trajectory in trajectories}) > 1


def centred(rewards_G: Sequence[float]) -> list[float]:
    if len(set(rewards_G)) == 1:
        return [0.0] * len(rewards_G)  # exactly 0, because a mean of equal rewards may have a rounding error
    mean = statistics.fmean(rewards_G)
    return [reward - mean for reward in rewards_G]


def standardised(rewards_G: Sequence[float], spread_floor: float) -> list[float]:
    spread = statistics.pstdev(rewards_G) + spread_floor
    return [advantage / spread for advantage in centred(rewards_G)]


def by_group(advantages: Callable[[Sequence[float]], list[float]]) -> Advantages:
    """Make Advantages for algorithms that only compare the rewards and shaping of siblings."""
    return lambda groups: [advantages(compared(group)) for group in groups]


def spread_over_tokens(group: Group, advantages_G: Sequence[float], clip: float) -> Credit:
    """Give every trained token its trajectory's advantage, limited to plus and minus `clip`; 0: no limit."""
    if clip:
        advantages_G = [max(-clip, min(clip, advantage)) for advantage in advantages_G]
    return [[advantage] * trajectory.num_trained for trajectory, advantage in zip(group, advantages_G, strict=True)]
