"""GSPO: one ratio and one clip for a whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.algo import importance_ratio, policy_gradient
from tandem.algo.advantages import by_group, standardised
from tandem.algo.policy_gradient import Objective
from tandem.protocols import Algorithm
from tandem.spec.algorithm import GspoSpec
from tandem.types import MicroBatch


def make(spec: GspoSpec) -> Algorithm:
    def advantages(rewards_G: Sequence[float]) -> list[float]:
        return standardised(rewards_G, spec.spread_floor)

    def objective(logprobs_N: Tensor, micro: MicroBatch, credit_N: Tensor) -> Objective:
        """Return the objective. Each token has a share of 1 / length, so a sequence's gradient is ratio * A * mean d
        logprob."""
        log_ratio_N = importance_ratio.log_ratio(logprobs_N, micro)
        ratio_N = importance_ratio.exp(importance_ratio.sequence_sum(log_ratio_N, micro) / micro.length_N)
        return policy_gradient.surrogate(logprobs_N, ratio_N, ratio_N, credit_N, spec)

    return policy_gradient.make("gspo", spec, by_group(advantages), objective, policy_gradient.sequence_mean)
