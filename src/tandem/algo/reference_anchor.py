"""Add a term to any algorithm that holds each token's logprob near a reference.

The term is half the square of the log-ratio per token. In supervised training it has a known limit: a demonstration's
gradient is 1 per token, so its logprob rises by at most 1 / kl_coef nats above the reference's. For tokens that the
policy sampled, the term's gradient is that of KL(policy, reference).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tandem.algo.policy_gradient import divergence
from tandem.protocols import Algorithm
from tandem.types import MicroBatch, TokenLogprobs, TokenSums, Totals


def anchored(algorithm: Algorithm, kl_coef: float) -> Algorithm:
    """Return the algorithm with the term; unchanged if `kl_coef` is 0."""
    if not kl_coef:
        return algorithm

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, TokenSums]:
        assert micro.reference_N is not None, f"{algorithm.name}: the reference's logprobs are missing"
        value, metrics = algorithm.loss(scored, micro, totals)
        away_N = divergence("k2", scored.logprobs_N, micro.reference_N)
        sums = {"loss/away": away_N.detach().sum()}
        return value + kl_coef * away_N.sum() / totals.tokens, {**metrics, **sums}

    return replace(algorithm, loss=loss, needs_reference=True)
