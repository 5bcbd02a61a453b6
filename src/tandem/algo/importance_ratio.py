"""Compute the weight of tokens that an older version sampled. N trained tokens, S sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.spec.algorithm import Correction, MaskSequence, MaskToken, NoCorrection, TruncateSequence
from tandem.types import MicroBatch, TokenSums

_MOST = 20.0  # limit of a log-ratio: e^20 is above any cap, and products with it stay finite in fp32


@dataclass(frozen=True, slots=True)
class Ratio:
    """Constants of each token, without a gradient."""

    weight_N: Tensor
    """The factor of a token's gradient."""
    drift_N: Tensor
    """The ratio of a token's probability now to that at sampling, which clips compare."""
    inside_N: Tensor
    """False: a mask drops the token."""
    metrics: TokenSums


def log_ratio(logprobs_N: Tensor, micro: MicroBatch) -> Tensor:
    return logprobs_N.detach() - micro.behaviour_N


def exp(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(max=_MOST).exp()


def sequence_sums(values_N: Tensor, micro: MicroBatch) -> Tensor:
    """Return the sum over each sequence."""
    return values_N.new_zeros(len(micro.group_S)).index_add(0, micro.sequence_N, values_N)


def sequence_sum(values_N: Tensor, micro: MicroBatch) -> Tensor:
    """Return for each token the sum over its sequence."""
    return sequence_sums(values_N, micro)[micro.sequence_N]


def corrected(logprobs_N: Tensor, micro: MicroBatch, correction: Correction) -> Ratio:
    log_ratio_N = log_ratio(logprobs_N, micro)
    token_N = exp(log_ratio_N)
    whole = isinstance(correction, TruncateSequence | MaskSequence)
    ratio_N = exp(sequence_sum(log_ratio_N, micro)) if whole else token_N
    inside_N, metrics = torch.ones_like(ratio_N, dtype=torch.bool), dict[str, Tensor]()
    if isinstance(correction, NoCorrection):
        weight_N = ratio_N
    elif isinstance(correction, MaskToken | MaskSequence):
        inside_N = (correction.ratio_floor <= ratio_N) & (ratio_N <= correction.ratio_cap)
        weight_N = ratio_N * inside_N
        metrics["loss/mask_fraction"] = (~inside_N).float().sum()
    else:
        weight_N = ratio_N.clamp(max=correction.ratio_cap)
        metrics["loss/cap_fraction"] = (weight_N >= correction.ratio_cap).float().sum()
    return Ratio(weight_N, token_N if whole else weight_N, inside_N, metrics)
