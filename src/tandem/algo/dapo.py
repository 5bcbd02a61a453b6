"""DAPO: divided by the group's spread, every token counted alike, clipped higher up than down, long answers punished.

What the environment gave decides whether a group is kept and has credit at all: siblings that are equally right or
wrong would otherwise be compared by their lengths alone, and the spread would blow that up to full size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tandem.algo import policy_gradient
from tandem.algo.credit import has_signal, standardised
from tandem.protocols import Algorithm
from tandem.spec.algorithm import DapoSpec
from tandem.types import Group, Trajectory


def make(spec: DapoSpec, max_tokens: int) -> Algorithm:
    """`max_tokens`: the most that the policy may say in a turn."""

    def shaped(trajectory: Trajectory) -> float:
        return trajectory.reward - spec.overlong_penalty * overlong(trajectory, max_tokens, spec.overlong_buffer)

    def advantages(groups: Sequence[Group]) -> list[list[float]]:
        return [
            standardised([shaped(trajectory) for trajectory in group], spec.spread_floor)
            if has_signal(group)
            else [0.0] * len(group)
            for group in groups
        ]

    return policy_gradient.make(
        "dapo", spec, advantages, policy_gradient.clipped(spec), policy_gradient.token_mean, keep=has_signal
    )


def overlong(trajectory: Trajectory, max_tokens: int, buffer: int) -> float:
    """From 0 at `buffer` tokens before the limit to 1 at the limit, by the longest turn; 1 if it was cut off there."""
    if trajectory.status == "truncated":
        return 1.0
    if buffer == 0:
        return 0.0
    turns = [len(list(run)) for trained, run in groupby(trajectory.trained) if trained]
    inside = max(turns, default=0) - (max_tokens - buffer)
    return min(1.0, max(0.0, inside / buffer))
