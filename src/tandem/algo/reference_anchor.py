"""Any algorithm, held to a reference: a token's logprob may not go far from what it was.

Half the square of the log-ratio, a token, as a term of the loss. For supervised training it is a leash of known length:
the push of a demonstration is 1 a token, so its logprob rises by at most 1 / kl_coef nats above the reference's. Of
tokens that the policy sampled itself, its gradient is that of KL(policy, reference).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tandem.algo.policy_gradient import divergence
from tandem.protocols import Algorithm
from tandem.types import Metrics, MicroBatch, TokenLogprobs, Totals


def anchored(algorithm: Algorithm, kl_coef: float) -> Algorithm:
    """`kl_coef` 0 leaves it as it is."""
    if not kl_coef:
        return algorithm

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        assert micro.reference_N is not None, f"{algorithm.name}: the reference's logprobs are missing"
        value, metrics = algorithm.loss(scored, micro, totals)
        away_N = divergence("k2", scored.logprobs_N, micro.reference_N)
        sums = {"loss/away": away_N.detach().sum().item()}
        return value + kl_coef * away_N.sum() / totals.tokens, {**metrics, **sums}

    return replace(algorithm, loss=loss, needs_reference=True)
