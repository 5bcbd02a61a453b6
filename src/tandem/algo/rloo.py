"""RLOO: reward minus the mean of the other siblings (leave one out)."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.algo import policy_gradient
from tandem.algo.advantages import by_group, centred
from tandem.protocols import Algorithm
from tandem.spec.algorithm import RlooSpec


def make(spec: RlooSpec) -> Algorithm:
    def advantages(rewards_G: Sequence[float]) -> list[float]:
        # r - mean(others) = (r - mean(all)) * G / (G - 1)
        scale = len(rewards_G) / (len(rewards_G) - 1)
        return [advantage * scale for advantage in centred(rewards_G)]

    return policy_gradient.make(
        "rloo", spec, by_group(advantages), policy_gradient.clipped(spec), policy_gradient.token_mean
    )
