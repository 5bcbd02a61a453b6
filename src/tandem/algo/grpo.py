"""GRPO as first published: divide by the group's standard deviation; average over each sequence, then over
sequences."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.algo import policy_gradient
from tandem.algo.advantages import by_group, standardised
from tandem.protocols import Algorithm
from tandem.spec.algorithm import GrpoSpec


def make(spec: GrpoSpec) -> Algorithm:
    def advantages(rewards_G: Sequence[float]) -> list[float]:
        return standardised(rewards_G, spec.spread_floor)

    return policy_gradient.make(
        "grpo", spec, by_group(advantages), policy_gradient.clipped(spec), policy_gradient.sequence_mean
    )
