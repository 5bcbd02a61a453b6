"""Supervised training: every trained token of a recording counts alike."""

from __future__ import annotations

from torch import Tensor

from tandem.algo.policy_gradient import by_group
from tandem.protocols import Algorithm, Credit
from tandem.types import Group, Metrics, MicroBatch, TokenLogprobs, Totals


def make() -> Algorithm:
    def keep(group: Group) -> bool:
        return any(trajectory.num_trained for trajectory in group)

    def credit(group: Group) -> Credit:
        return [[1.0] * trajectory.num_trained for trajectory in group]

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        value = -(scored.logprobs_N * micro.credit_N).sum() / totals.tokens
        return value, {"policy/entropy": scored.entropy_N.sum().item()}

    return Algorithm("sft", keep, by_group(credit), loss)
