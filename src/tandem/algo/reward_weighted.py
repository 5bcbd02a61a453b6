"""Reward-weighted answers: an answer without siblings has its reward as the advantage."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.algo.advantages import has_tokens
from tandem.algo.policy_gradient import clipped, token_mean
from tandem.algo.policy_gradient import make as make_policy_gradient
from tandem.protocols import Algorithm
from tandem.spec.algorithm import ClippedSpec
from tandem.types import Group


def make(spec: ClippedSpec) -> Algorithm:
    """Make the algorithm. Rewards should be around 0: a positive one makes its answer likelier, a negative one less."""

    def advantages(groups: Sequence[Group]) -> list[list[float]]:
        return [[trajectory.reward for trajectory in group] for group in groups]

    return make_policy_gradient("reward", spec, advantages, clipped(spec), token_mean, has_tokens)
