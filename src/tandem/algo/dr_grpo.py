"""Dr. GRPO: reward minus the group's mean, with equal weight for every token of the step."""

from __future__ import annotations

from tandem.algo import policy_gradient
from tandem.algo.advantages import by_group, centred
from tandem.protocols import Algorithm
from tandem.spec.algorithm import DrGrpoSpec


def make(spec: DrGrpoSpec) -> Algorithm:
    return policy_gradient.make(
        "dr_grpo", spec, by_group(centred), policy_gradient.clipped(spec), policy_gradient.token_mean
    )
