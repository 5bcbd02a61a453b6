"""DAPO: GRPO with equal weight for every token, a higher upper clip, and a penalty for long answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tandem.algo import policy_gradient
from tandem.algo.advantages import compared, standardised
from tandem.protocols import Algorithm
from tandem.spec.algorithm import DapoSpec
from tandem.types import Group, Trajectory


def make(spec: DapoSpec, max_tokens: int) -> Algorithm:
    """Make the algorithm. `max_tokens`: most tokens of a turn."""

    def shaping(trajectory: Trajectory) -> float:
        return trajectory.shaping - spec.overlong_penalty * overlong(trajectory, max_tokens, spec.overlong_buffer)

    def advantages(groups: Sequence[Group]) -> list[list[float]]:
        return [standardised(compared(group, shaping), spec.spread_floor) for group in groups]

    return policy_gradient.make("dapo", spec, advantages, policy_gradient.clipped(spec), policy_gradient.token_mean)


def overlong(trajectory: Trajectory, max_tokens: int, buffer: int) -> float:
    """Return the penalty of the longest turn: from 0 at `buffer` tokens before the limit to 1 at the limit, and 1 for a
    truncated turn."""
    if trajectory.status == "truncated":
        return 1.0
    if buffer == 0:
        return 0.0
    turns = [len(list(run)) for trained, run in groupby(trajectory.trained) if trained]
    inside = max(turns, default=0) - (max_tokens - buffer)
    return min(1.0, max(0.0, inside / buffer))
