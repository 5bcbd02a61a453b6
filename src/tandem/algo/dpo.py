"""DPO: raise the chosen of two answers to one prompt over the rejected one, relative to a frozen reference.

N trained tokens, S sequences, P pairs. A pair is a group: its better answer has the higher reward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import logsigmoid

from tandem.protocols import Algorithm, Credit
from tandem.spec.preference import DpoSpec
from tandem.types import Group, MicroBatch, TokenLogprobs, TokenSums, Totals


def make(spec: DpoSpec) -> Algorithm:
    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, TokenSums]:
        assert micro.reference_N is not None, "dpo: the reference's logprobs are missing"
        num_pairs = totals.sequences / 2
        weight_N = micro.credit_N / micro.length_N if spec.length_normalised else micro.credit_N
        gain_N = spec.beta * weight_N * (scored.logprobs_N - micro.reference_N)
        margin_P = micro.pair_sums(gain_N)
        losses_P = pair_losses(margin_P, spec.label_smoothing)
        chosen_N = micro.credit_N > 0
        imitation = -(scored.logprobs_N / micro.length_N)[chosen_N].sum()
        value = (losses_P.sum() + spec.sft_coef * imitation) / num_pairs
        per_pair = {
            "reward/margin": margin_P.sum(),
            "reward/accuracy": (margin_P > 0).sum() + 0.5 * (margin_P == 0).sum(),  # a tie counts as half right
            "reward/chosen": gain_N[chosen_N].sum(),
            "reward/rejected": -gain_N[~chosen_N].sum(),
            "logprob/chosen": scored.logprobs_N[chosen_N].sum(),
            "logprob/rejected": scored.logprobs_N[~chosen_N].sum(),
        }
        # The trainer divides by the step's tokens (with a reference, all are computed); these are means over its pairs.
        metrics = {name: total.double() * totals.tokens / num_pairs for name, total in per_pair.items()}
        return value, {**metrics, "policy/entropy": scored.entropy_N.sum()}

    return Algorithm("dpo", is_pair, credit, loss, needs_reference=True, together=True)


def is_pair(group: Group) -> bool:
    return len(group) == 2 and group[0].reward != group[1].reward and all(each.num_trained for each in group)


def credit(groups: Sequence[Group]) -> list[Credit]:
    """Return +1 for each token of the better answer and -1 for the other's, so that the margin is one sum."""
    assert all(is_pair(group) for group in groups), "dpo: a group is two answers, one of them better"
    return [[[_sign(each.reward, group)] * each.num_trained for each in group] for group in groups]


def _sign(reward: float, group: Group) -> float:
    return 1.0 if reward == max(each.reward for each in group) else -1.0


def pair_losses(margin_P: Tensor, label_smoothing: float) -> Tensor:
    """Return the cross-entropy of "the chosen answer is better", which is true with probability 1 - label_smoothing."""
    return -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
