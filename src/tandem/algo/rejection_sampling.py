"""Rejection sampling (best of n, RAFT): imitate the best answers of each group, as supervised training would.

An answer that is not among them is not trained on at all: it counts in no total and is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.algo import importance_ratio
from tandem.algo.advantages import compared, has_signal
from tandem.algo.policy_gradient import pushing
from tandem.protocols import Algorithm, Credit
from tandem.spec.algorithm import RejectionSamplingSpec
from tandem.types import Group, MicroBatch, TokenLogprobs, TokenSums, Totals


def make(spec: RejectionSamplingSpec) -> Algorithm:
    def credit(groups: Sequence[Group]) -> list[Credit]:
        return [_credit(group, spec.best) for group in groups]

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, TokenSums]:
        found = importance_ratio.corrected(scored.logprobs_N, micro, spec.correction)
        value_N = pushing(found.weight_N, scored.logprobs_N) * micro.credit_N
        sums = {
            **found.metrics,
            "loss/ratio_mean": found.weight_N.sum(),
            "policy/entropy": scored.entropy_N.sum(),
        }
        return -value_N.sum() / totals.tokens, sums

    return Algorithm("rejection_sampling", has_signal, credit, loss)


def _credit(group: Group, best: int) -> Credit:
    """Give 1 to each token of the `best` answers with the highest rewards, the first of equal ones before the others.
    None of them has the group's lowest reward."""
    lowest = min(each.reward for each in group)
    above = [number for number, each in enumerate(group) if each.reward > lowest]
    values = compared(group)
    chosen = sorted(above, key=lambda number: values[number], reverse=True)[:best]
    return [[1.0] * each.num_trained if number in chosen else [] for number, each in enumerate(group)]
