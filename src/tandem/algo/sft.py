"""Supervised training: every trained token of a recording has equal weight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.algo.advantages import has_tokens
from tandem.protocols import Algorithm, Credit
from tandem.types import Group, Metrics, MicroBatch, TokenLogprobs, Totals


def make() -> Algorithm:
    def credit(groups: Sequence[Group]) -> list[Credit]:
        return [[[1.0] * trajectory.num_trained for trajectory in group] for group in groups]

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        value = -(scored.logprobs_N * micro.credit_N).sum() / totals.tokens
        return value, {"policy/entropy": scored.entropy_N.sum().item()}

    return Algorithm("sft", has_tokens, credit, loss)
