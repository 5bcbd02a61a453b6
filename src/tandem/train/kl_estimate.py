"""Estimate the divergence of the policy from its reference over a whole step, which KTO compares each answer with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem.protocols import Policy
from tandem.types import Batch, MicroBatch


def set_kl(policy: Policy, batches: Sequence[Batch], temperature: float = 1.0, top_p: float = 1.0) -> None:
    """Set `kl` of every micro-batch, from the mismatched answers of all batches."""
    give_kl(batches, [gain(policy, each, temperature, top_p) for batch in batches for each in batch.mismatched])


def gain(policy: Policy, micro: MicroBatch, temperature: float = 1.0, top_p: float = 1.0) -> float:
    """Return the sum of log policy minus log reference over a micro-batch's tokens."""
    logprobs_N = policy.score(micro, temperature, top_p)
    return (logprobs_N - policy.reference_logprobs(micro, temperature, top_p)).sum().item()


def give_kl(batches: Sequence[Batch], gains: Sequence[float]) -> None:
    """Set `kl` of every micro-batch: the mean gain of a mismatched answer; 0 if it is negative, as no divergence is.
    The sum does not depend on the order of `gains`."""
    answers = sum(len(micro.group_S) for batch in batches for micro in batch.mismatched)
    kl = max(0.0, math.fsum(gains) / answers)
    for batch in batches:
        for micro in batch.micro:
            micro.kl = kl
