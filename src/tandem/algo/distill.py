"""On-policy distillation: the policy samples, and a teacher scores each token (reverse KL).

A teacher in this process scores micro-batches, as a reference does. A served one has scored the answers before they are
packed. Both arrive as `micro.reference_N`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.algo import importance_ratio
from tandem.algo.advantages import centred, compared, has_tokens, spread_over_tokens
from tandem.algo.policy_gradient import pushing, token_mean
from tandem.protocols import Algorithm, Credit
from tandem.spec.algorithm import DistillSpec
from tandem.types import Group, MicroBatch, TokenLogprobs, TokenSums, Totals


def make(spec: DistillSpec) -> Algorithm:
    def credit(groups: Sequence[Group]) -> list[Credit]:
        """Return the rewards' part of the credit; the loss adds the teacher's part."""
        scaled = [[spec.reward_coef * advantage for advantage in centred(compared(group))] for group in groups]
        return [spread_over_tokens(group, scaled_G, clip=0.0) for group, scaled_G in zip(groups, scaled, strict=True)]

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, TokenSums]:
        assert micro.reference_N is not None, "distill: the teacher's logprobs are missing"
        gap_N = scored.logprobs_N.detach() - micro.reference_N
        credit_N = micro.credit_N - gap_N
        if spec.advantage_clip:
            credit_N = credit_N.clamp(-spec.advantage_clip, spec.advantage_clip)
        found = importance_ratio.corrected(scored.logprobs_N, micro, spec.correction)
        value_N = pushing(found.weight_N, scored.logprobs_N) * credit_N
        sums = {
            **found.metrics,
            "loss/ratio_mean": found.weight_N.sum(),
            "loss/kl": gap_N.sum(),
            "policy/entropy": scored.entropy_N.sum(),
        }
        return -(value_N * token_mean(micro, totals)).sum(), sums

    return Algorithm("distill", has_tokens, credit, loss, needs_reference=not spec.is_served, credit_is_all=False)
