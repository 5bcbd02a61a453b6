"""KTO: raise answers that are labelled good and lower those labelled bad, relative to a frozen reference.

An answer counts as raised once its gain on the reference is above KL(policy, reference). The trainer estimates this KL
before the step, without a gradient, on prompts with answers to other prompts. A group is a labelled answer and such a
mismatched one. N trained tokens, S answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.algo.importance_ratio import sequence_sums
from tandem.protocols import Algorithm, Credit
from tandem.spec.preference import KtoSpec
from tandem.types import Group, MicroBatch, TokenLogprobs, TokenSums, Totals


def make(spec: KtoSpec) -> Algorithm:
    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, TokenSums]:
        assert micro.reference_N is not None, "kto: the reference's logprobs are missing"
        gain_S = sequence_sums(scored.logprobs_N - micro.reference_N, micro)
        sign_S = sequence_sums(micro.credit_N / micro.length_N, micro).sign()
        weight_S = torch.where(sign_S > 0, spec.desirable_weight, spec.undesirable_weight)
        beyond_S = spec.beta * sign_S * (gain_S - micro.kl)
        value = (weight_S * torch.sigmoid(-beyond_S)).sum() / totals.sequences
        per_answer = {
            "reward/margin": spec.beta * (sign_S * gain_S).sum(),
            "reward/accuracy": (beyond_S > 0).sum() + 0.5 * (beyond_S == 0).sum(),  # a tie counts as half right
            "loss/kl": gain_S.new_tensor(micro.kl * len(gain_S)),
        }
        # The trainer divides by the step's tokens; these are means over its answers.
        metrics = {name: total.double() * totals.tokens / totals.sequences for name, total in per_answer.items()}
        return value, {**metrics, "policy/entropy": scored.entropy_N.sum()}

    return Algorithm("kto", is_labelled, credit, loss, needs_reference=True, needs_kl=True)


def is_labelled(group: Group) -> bool:
    return len(group) == 2 and group[0].reward in (1.0, -1.0) and all(each.num_trained for each in group)


def credit(groups: Sequence[Group]) -> list[Credit]:
    """Return +1 for each token of a good answer, -1 for one of a bad answer, and nothing for the mismatched answer."""
    assert all(is_labelled(group) for group in groups), "kto: a group is a labelled answer and a mismatched one"
    return [[[labelled.reward] * labelled.num_trained, []] for labelled, _ in groups]
