"""Supervised training: every trained token of a recording has equal weight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.algo.advantages import has_tokens
from tandem.protocols import Algorithm, Credit
from tandem.types import Group, MicroBatch, TokenLogprobs, TokenSums, Totals


def make() -> Algorithm:
    def credit(groups: Sequence[Group]) -> list[Credit]:
        return [[[1.0] * trajectory.num_trained for trajectory in group] for group in groups]

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, TokenSums]:
        value = -(scored.logprobs_N * micro.credit_N).sum() / totals.tokens
        return value, {"policy/entropy": scored.entropy_N.sum()}

    return Algorithm("sft", has_tokens, credit, loss)
