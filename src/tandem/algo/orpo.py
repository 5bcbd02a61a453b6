"""ORPO: imitate the chosen of two answers and raise its odds over the rejected one's, without a reference model.

N trained tokens, S sequences, P pairs. A pair is a group, as in algo/dpo.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tandem.algo.dpo import credit, is_pair
from tandem.algo.importance_ratio import sequence_sums
from tandem.protocols import Algorithm
from tandem.spec.preference import OrpoSpec
from tandem.types import MicroBatch, TokenLogprobs, TokenSums, Totals

_SUREST = -1e-6  # largest mean logprob of a token; at 0 the odds would be infinite, and fp32 rounds to 0


def make(spec: OrpoSpec) -> Algorithm:
    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, TokenSums]:
        num_pairs = totals.sequences / 2
        mean_S = sequence_sums(scored.logprobs_N / micro.length_N, micro)
        sign_S = sequence_sums(micro.credit_N / micro.length_N, micro)
        # The odds belong to whole answers; each token carries its share to the sum over the pair.
        share_N = (sign_S * log_odds(mean_S))[micro.sequence_N] / micro.length_N
        margin_P = micro.pair_sums(share_N)
        chosen_S = sign_S > 0
        imitation = -mean_S[chosen_S].sum()
        value = (imitation - spec.beta * logsigmoid(margin_P).sum()) / num_pairs
        per_pair = {
            "reward/margin": margin_P.sum(),
            "reward/accuracy": (margin_P > 0).sum() + 0.5 * (margin_P == 0).sum(),  # a tie counts as half right
            "logprob/chosen": mean_S[chosen_S].sum(),
            "logprob/rejected": mean_S[~chosen_S].sum(),
        }
        # The trainer divides by the step's tokens, and every token of a pair is computed; these are means over pairs.
        metrics = {name: total.double() * totals.tokens / num_pairs for name, total in per_pair.items()}
        return value, {**metrics, "policy/entropy": scored.entropy_N.sum()}

    return Algorithm("orpo", is_pair, credit, loss, together=True)


def log_odds(logprob_S: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of p = exp(logprob). An answer that is certain has the odds of one that nearly is, and
    keeps a gradient."""
    bounded_S = logprob_S + (logprob_S.clamp(max=_SUREST) - logprob_S).detach()
    return bounded_S - torch.log(-torch.expm1(bounded_S))
