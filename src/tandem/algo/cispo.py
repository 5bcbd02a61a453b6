"""CISPO: the clipped ratio is a constant weight of each token's gradient, so no token loses its gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.algo import importance_ratio, policy_gradient
from tandem.algo.advantages import by_group, standardised
from tandem.algo.policy_gradient import Objective, pushing
from tandem.protocols import Algorithm
from tandem.spec.algorithm import CispoSpec
from tandem.types import MicroBatch


def make(spec: CispoSpec) -> Algorithm:
    def advantages(rewards_G: Sequence[float]) -> list[float]:
        return standardised(rewards_G, spec.spread_floor)

    def objective(logprobs_N: Tensor, micro: MicroBatch, credit_N: Tensor) -> Objective:
        ratio_N = importance_ratio.exp(importance_ratio.log_ratio(logprobs_N, micro))
        weight_N = ratio_N.clamp(1 - spec.clip_low, 1 + spec.clip_high)
        metrics = {
            "loss/clip_fraction": (weight_N != ratio_N).float().sum(),
            "loss/ratio_mean": weight_N.sum(),
        }
        return Objective(pushing(weight_N, logprobs_N) * credit_N, weight_N, metrics)

    return policy_gradient.make("cispo", spec, by_group(advantages), objective, policy_gradient.token_mean)
