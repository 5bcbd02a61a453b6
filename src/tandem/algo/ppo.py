"""PPO's clipped surrogate without a critic: reward minus the group's mean, with a second clip if A < 0 (dual clip)."""

from __future__ import annotations

from torch import Tensor

from tandem.algo import importance_ratio, policy_gradient
from tandem.algo.advantages import by_group, centred
from tandem.algo.policy_gradient import Objective
from tandem.protocols import Algorithm
from tandem.spec.algorithm import PpoSpec
from tandem.types import MicroBatch


def make(spec: PpoSpec) -> Algorithm:
    def objective(logprobs_N: Tensor, micro: MicroBatch, credit_N: Tensor) -> Objective:
        ratio_N = importance_ratio.exp(importance_ratio.log_ratio(logprobs_N, micro))
        made = policy_gradient.surrogate(logprobs_N, ratio_N, ratio_N, credit_N, spec, dual=spec.dual_clip)
        beyond = ((ratio_N > spec.dual_clip) & (credit_N < 0)).float().sum()
        # The clip does not limit the KL term, so that needs its own bound.
        kl_weight_N = ratio_N.clamp(max=spec.dual_clip)
        return Objective(made.value_N, kl_weight_N, {**made.metrics, "loss/dual_clip_fraction": beyond})

    return policy_gradient.make("ppo", spec, by_group(centred), objective, policy_gradient.token_mean)
