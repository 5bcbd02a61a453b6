"""Estimate the divergence of the policy from its reference over a whole step, which KTO compares each answer with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem.protocols import Policy
from tandem.types import Batch


def set_kl(policy: Policy, batches: Sequence[Batch], temperature: float = 1.0, top_p: float = 1.0) -> None:
    """Set `kl` of every micro-batch: the mean, over the mismatched answers of all batches, of log policy minus log
    reference; 0 if it is negative, as no divergence is."""
    micros = [micro for batch in batches for micro in batch.mismatched]
    gains = [
        (policy.score(micro, temperature, top_p) - policy.reference_logprobs(micro, temperature, top_p)).sum().item()
        for micro in micros
    ]
    kl = max(0.0, math.fsum(gains) / sum(len(micro.group_S) for micro in micros))
    for batch in batches:
        for micro in batch.micro:
            micro.kl = kl
