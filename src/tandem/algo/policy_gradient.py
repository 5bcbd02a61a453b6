"""Shared by the policy-gradient algorithms: an objective and a share per token, and a KL term. N trained tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from tandem.algo import importance_ratio
from tandem.algo.advantages import Advantages, has_signal, spread_over_tokens
from tandem.protocols import Algorithm, Credit
from tandem.spec.algorithm import ClippedSpec, RewardSpec
from tandem.types import Group, MicroBatch, TokenLogprobs, TokenSums, Totals


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of each token, to be maximised."""

    value_N: Tensor
    """The value, with its gradient."""
    weight_N: Tensor
    """The constant factor of the KL term."""
    metrics: TokenSums
    """Sums over tokens; the trainer divides them by the number of computed tokens."""


class Clip(Protocol):
    @property
    def clip_low(self) -> float: ...
    @property
    def clip_high(self) -> float: ...


MakeObjective = Callable[[Tensor, MicroBatch, Tensor], Objective]
"""Makes an Objective of the logprobs, their micro-batch and each token's credit."""
Share = Callable[[MicroBatch, Totals], Tensor]
"""The share of each token in the optimizer step: the shares of all micro-batches sum to 1."""


def token_mean(micro: MicroBatch, totals: Totals) -> Tensor:
    return micro.length_N.new_full(micro.length_N.shape, 1 / totals.tokens)


def sequence_mean(micro: MicroBatch, totals: Totals) -> Tensor:
    return 1 / (micro.length_N * totals.sequences)


def make(
    name: str,
    spec: RewardSpec,
    advantages: Advantages,
    objective: MakeObjective,
    share: Share,
    keep: Callable[[Group], bool] = has_signal,
) -> Algorithm:
    def credit(groups: Sequence[Group]) -> list[Credit]:
        pairs = zip(groups, advantages(groups), strict=True)
        return [spread_over_tokens(group, advantages_G, spec.advantage_clip) for group, advantages_G in pairs]

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, TokenSums]:
        return policy_loss(spec, objective, scored, micro, share(micro, totals))

    return Algorithm(name, keep, credit, loss, needs_reference=spec.kl_coef > 0)


def policy_loss(
    spec: RewardSpec, objective: MakeObjective, scored: TokenLogprobs, micro: MicroBatch, share_N: Tensor
) -> tuple[Tensor, TokenSums]:
    """Return the loss of one micro-batch."""
    if micro.reference_N is None:
        made = objective(scored.logprobs_N, micro, micro.credit_N)
        kl_N = torch.zeros_like(made.weight_N)
    else:
        kl_N = divergence(spec.kl_estimator, scored.logprobs_N, micro.reference_N)
        # k1's own gradient has mean zero; as a part of the credit it gives the gradient of the KL.
        penalty_N = spec.kl_coef * kl_N.detach() if spec.kl_estimator == "k1" else 0.0
        made = objective(scored.logprobs_N, micro, micro.credit_N - penalty_N)
    loss = -(made.value_N * share_N).sum()
    sums = {**made.metrics, "policy/entropy": scored.entropy_N.sum()}
    if micro.reference_N is not None:
        sums["loss/kl"] = kl_N.detach().sum()
        if spec.kl_estimator != "k1":
            loss = loss + spec.kl_coef * (made.weight_N * kl_N * share_N).sum()
    return loss, sums


def divergence(estimator: Literal["k1", "k2", "k3"], logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Estimate KL(policy, reference) from tokens that the policy sampled; k1 and k3 are unbiased."""
    gap_N = reference_N - logprobs_N
    if estimator == "k1":
        return -gap_N
    return gap_N.square() / 2 if estimator == "k2" else gap_N.exp() - gap_N - 1


def clipped(spec: ClippedSpec) -> MakeObjective:
    """Make the clipped surrogate with the spec's correction."""

    def objective(logprobs_N: Tensor, micro: MicroBatch, credit_N: Tensor) -> Objective:
        found = importance_ratio.corrected(logprobs_N, micro, spec.correction)
        made = surrogate(logprobs_N, found.weight_N, found.drift_N, credit_N * found.inside_N, spec)
        return Objective(made.value_N, made.weight_N, {**made.metrics, **found.metrics})

    return objective


def surrogate(
    logprobs_N: Tensor, weight_N: Tensor, drift_N: Tensor, credit_N: Tensor, clip: Clip, dual: float = math.inf
) -> Objective:
    """Return min(d A, clip(d) A) per token, and at least dual * A if A < 0, with the drift d.

    The clip sets the gradient to zero in these cases only: above 1 + clip_high if A > 0; below 1 - clip_low or above
    `dual` if A < 0. Otherwise the gradient is weight * A, even if the weight was cut.
    """
    low, high = 1 - clip.clip_low, 1 + clip.clip_high
    bounded_N = torch.where(credit_N > 0, drift_N.clamp(max=high), drift_N.clamp(low, dual))
    free_N = drift_N == bounded_N
    value_N = credit_N * torch.where(free_N, pushing(weight_N, logprobs_N), bounded_N)
    metrics = {
        "loss/clip_fraction": (~free_N & (credit_N != 0)).float().sum(),
        "loss/ratio_mean": weight_N.sum(),
    }
    return Objective(value_N, weight_N, metrics)


def pushing(weight_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """Return the weight as a value, with the gradient weight * d logprob."""
    return weight_N * (logprobs_N - logprobs_N.detach()).exp()
