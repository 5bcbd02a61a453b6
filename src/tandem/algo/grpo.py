"""GRPO as first published: divided by the group's spread, averaged within each sequence, then over sequences."""

from __future__ import annotations

import statistics

from torch import Tensor

from tandem.algo.policy_gradient import by_group, centred, has_signal, policy_loss, spread_over_tokens
from tandem.protocols import Algorithm, Credit
from tandem.spec.algorithm import GrpoSpec
from tandem.types import Group, Metrics, MicroBatch, TokenLogprobs, Totals


def make(spec: GrpoSpec) -> Algorithm:
    def credit(group: Group) -> Credit:
        spread = statistics.pstdev(trajectory.reward for trajectory in group) + spec.spread_floor
        return spread_over_tokens(group, [advantage / spread for advantage in centred(group)])

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        return policy_loss(spec, scored, micro, 1 / (micro.length_N * totals.sequences))

    return Algorithm("grpo", has_signal, by_group(credit), loss, needs_reference=spec.kl_coef > 0)
