"""RLOO: reward minus the mean of the other siblings (leave one out)."""

from __future__ import annotations

from tandem.algo.dr_grpo import token_mean_loss
from tandem.algo.policy_gradient import by_group, centred, has_signal, spread_over_tokens
from tandem.protocols import Algorithm, Credit
from tandem.spec.algorithm import RlooSpec
from tandem.types import Group


def make(spec: RlooSpec) -> Algorithm:
    def credit(group: Group) -> Credit:
        # r - mean(others) = (r - mean(all)) * G / (G - 1)
        scale = len(group) / (len(group) - 1)
        return spread_over_tokens(group, [advantage * scale for advantage in centred(group)])

    return Algorithm("rloo", has_signal, by_group(credit), token_mean_loss(spec), needs_reference=spec.kl_coef > 0)
