"""Dr. GRPO: reward minus the group's mean, every token of the step counted alike."""

from __future__ import annotations

from torch import Tensor

from tandem.algo.policy_gradient import by_group, centred, has_signal, policy_loss, spread_over_tokens
from tandem.protocols import Algorithm, Credit
from tandem.spec.algorithm import AlgorithmSpec
from tandem.types import Group, Metrics, MicroBatch, TokenLogprobs, Totals


def make(spec: AlgorithmSpec) -> Algorithm:
    def credit(group: Group) -> Credit:
        return spread_over_tokens(group, centred(group))

    return Algorithm("dr_grpo", has_signal, by_group(credit), token_mean_loss(spec), needs_reference=spec.kl_coef > 0)


def token_mean_loss(spec: AlgorithmSpec):
    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        return policy_loss(spec, scored, micro, micro.length_N.new_full(micro.length_N.shape, 1 / totals.tokens))

    return loss
