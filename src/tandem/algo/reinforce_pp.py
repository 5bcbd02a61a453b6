"""REINFORCE++: advantages normalised over all groups of the step, with equal weight for every token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tandem.algo import policy_gradient
from tandem.algo.advantages import centred, compared, has_signal, has_tokens
from tandem.protocols import Algorithm
from tandem.spec.algorithm import ReinforcePpSpec
from tandem.types import Group


def make(spec: ReinforcePpSpec) -> Algorithm:
    by_siblings = spec.baseline == "group"

    def advantages(groups: Sequence[Group]) -> list[list[float]]:
        """Return the advantages. Each trajectory counts once in mean and standard deviation, whatever its length."""
        if by_siblings:
            flat = [advantage for group in groups for advantage in centred(compared(group))]
        else:
            flat = centred(compared([trajectory for group in groups for trajectory in group]))
        spread = statistics.pstdev(flat) + spec.spread_floor
        remaining = iter(flat)
        return [[next(remaining) / spread for _ in group] for group in groups]

    return policy_gradient.make(
        "reinforce_pp", spec, advantages, policy_gradient.clipped(spec), policy_gradient.token_mean,
        keep=has_signal if by_siblings else has_tokens,
    )  # fmt: skip
