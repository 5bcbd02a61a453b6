"""What the policy-gradient algorithms share: the clipped, truncated objective. N trained tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.protocols import Credit
from tandem.spec.algorithm import AlgorithmSpec
from tandem.types import Group, Metrics, MicroBatch, TokenLogprobs


def has_signal(group: Group) -> bool:
    """Siblings with equal rewards have no advantage over each other."""
    return len({trajectory.reward for trajectory in group}) > 1 and any(trajectory.num_trained for trajectory in group)


def by_group(credit: Callable[[Group], Credit]) -> Callable[[Sequence[Group]], list[Credit]]:
    """For algorithms that compare siblings only."""
    return lambda groups: [credit(group) for group in groups]


def spread_over_tokens(group: Group, advantages_G: list[float]) -> Credit:
    return [[advantage] * trajectory.num_trained for trajectory, advantage in zip(group, advantages_G, strict=True)]


def centred(group: Group) -> list[float]:
    if not has_signal(group):
        return [0.0] * len(group)  # exactly: a mean of equal rewards may be off by a rounding
    mean = statistics.fmean(trajectory.reward for trajectory in group)
    return [trajectory.reward - mean for trajectory in group]


def objective(logprobs_N: Tensor, behaviour_N: Tensor, credit_N: Tensor, spec: AlgorithmSpec) -> tuple[Tensor, Metrics]:
    """min(w A, clip(w) A) per token, with w = min(pi / behaviour, cap).

    The truncation bounds the weight and keeps the gradient: past the cap a token still pushes, with weight `cap`.
    The clip ends the gradient: above 1 + clip_high where A > 0, below 1 - clip_low where A < 0, and nowhere else.
    """
    truncated_N = (logprobs_N.detach() - behaviour_N).exp().clamp(max=spec.ratio_cap)
    weight_N = (
        truncated_N * (logprobs_N - logprobs_N.detach()).exp()
    )  # value: truncated; gradient: truncated * d logprob
    clipped_N = weight_N.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    objective_N = torch.minimum(weight_N * credit_N, clipped_N * credit_N)
    with torch.no_grad():
        beyond_N = torch.where(
            credit_N > 0, truncated_N > 1 + spec.clip_high, (truncated_N < 1 - spec.clip_low) & (credit_N < 0)
        )
        metrics = {
            "loss/clip_fraction": beyond_N.float().sum().item(),
            "loss/cap_fraction": (truncated_N >= spec.ratio_cap).float().sum().item(),
            "loss/ratio_mean": truncated_N.sum().item(),
        }
    return objective_N, metrics


def policy_loss(
    spec: AlgorithmSpec, scored: TokenLogprobs, micro: MicroBatch, share_N: Tensor
) -> tuple[Tensor, Metrics]:
    """The loss of one micro-batch. `share_N` weighs each token within the optimizer step (it sums to 1 over all of it).

    Metrics are sums over tokens; the trainer divides them by how many it computed.
    """
    objective_N, sums = objective(scored.logprobs_N, micro.behaviour_N, micro.credit_N, spec)
    loss = -(objective_N * share_N).sum()
    if micro.reference_N is not None:
        gap_N = micro.reference_N - scored.logprobs_N
        kl_N = gap_N.exp() - gap_N - 1  # never negative, unbiased for tokens that this policy sampled
        loss = loss + spec.kl_coef * (kl_N * share_N).sum()
        sums["loss/kl"] = kl_N.detach().sum().item()
    return loss, {**sums, "policy/entropy": scored.entropy_N.sum().item()}
