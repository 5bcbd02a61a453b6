"""Bradley-Terry: train a reward model to give the better of two answers the higher score.

N trained tokens, P pairs. `scored.logprobs_N` are scores here; that of an answer is the score at its last token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tandem.algo.dpo import credit, is_pair
from tandem.protocols import Algorithm
from tandem.spec.preference import RewardModelSpec
from tandem.types import MicroBatch, TokenLogprobs, TokenSums, Totals


def make(spec: RewardModelSpec) -> Algorithm:
    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, TokenSums]:
        num_pairs = totals.sequences / 2
        score_N = scored.logprobs_N * _ends(micro)
        margin_P = micro.pair_sums(micro.credit_N * score_N)
        value = -logsigmoid(margin_P).sum() / num_pairs
        if spec.centre_coef:
            value = value + spec.centre_coef * micro.pair_sums(score_N).square().sum() / num_pairs
        chosen_N = micro.credit_N > 0
        per_pair = {
            "reward/margin": margin_P.sum(),
            "reward/accuracy": (margin_P > 0).sum() + 0.5 * (margin_P == 0).sum(),  # a tie counts as half right
            "reward/chosen": score_N[chosen_N].sum(),
            "reward/rejected": score_N[~chosen_N].sum(),
        }
        # The trainer divides by the step's tokens; these are means over its pairs.
        return value, {name: total.double() * totals.tokens / num_pairs for name, total in per_pair.items()}

    return Algorithm("reward_model", is_pair, credit, loss, together=True)


def _ends(micro: MicroBatch) -> Tensor:
    """Return 1 for the last token of each sequence, and 0 for the others."""
    ends_N = torch.ones_like(micro.sequence_N, dtype=torch.bool)
    ends_N[:-1] = micro.sequence_N[1:] != micro.sequence_N[:-1]
    return ends_N.float()
