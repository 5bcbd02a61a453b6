"""Groups and micro-batches small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.algo import cispo, dapo, distill, dr_grpo, grpo, gspo, ppo, reinforce_pp, rejection_sampling, rloo
from tandem.protocols import Algorithm
from tandem.spec.algorithm import (
    CispoSpec,
    DapoSpec,
    DistillSpec,
    DrGrpoSpec,
    GrpoSpec,
    GspoSpec,
    PpoSpec,
    ReinforcePpSpec,
    RejectionSamplingSpec,
    RlooSpec,
)
from tandem.types import Group, MicroBatch, PackedRows, TokenLogprobs, Trajectory

CPU = torch.device("cpu")
MAX_TOKENS = 16

MAKERS: dict[str, Any] = {
    "dr_grpo": lambda **spec: dr_grpo.make(DrGrpoSpec(**spec)),
    "grpo": lambda **spec: grpo.make(GrpoSpec(**spec)),
    "rloo": lambda **spec: rloo.make(RlooSpec(**spec)),
    "dapo": lambda **spec: dapo.make(DapoSpec(**spec), MAX_TOKENS),
    "gspo": lambda **spec: gspo.make(GspoSpec(**spec)),
    "cispo": lambda **spec: cispo.make(CispoSpec(**spec)),
    "reinforce_pp": lambda **spec: reinforce_pp.make(ReinforcePpSpec(**spec)),
    "ppo": lambda **spec: ppo.make(PpoSpec(**spec)),
    "rejection_sampling": lambda **spec: rejection_sampling.make(RejectionSamplingSpec(**spec)),
    "distill": lambda **spec: distill.make(DistillSpec(teacher="teacher", **spec)),
}
FROM_REWARDS = [name for name in MAKERS if name not in ("distill", "rejection_sampling")]
"""Those whose credit compares siblings with each other."""
CORRECTED = ["dr_grpo", "grpo", "rloo", "dapo", "reinforce_pp"]
"""Those with the clipped surrogate and a choice of corrections."""


def algorithm_of(name: str, **spec: Any) -> Algorithm:
    return MAKERS[name](**spec)


def group_of(*samples: tuple[float, int]) -> Group:
    """(reward, trained tokens) of each sibling; the prompt is two tokens."""
    return [
        Trajectory(
            ids=[1, 2, *range(3, 3 + count)],
            trained=[False] * 2 + [True] * count,
            logprobs=[0.0] * 2 + [-1.0 - 0.25 * i for i in range(count)],
            versions=[-1] * 2 + [0] * count,
            reward=reward,
        )
        for reward, count in samples
    ]


def micro_of(
    sequences: Sequence[tuple[float, Sequence[float]]], dtype: torch.dtype = torch.float32
) -> tuple[TokenLogprobs, MicroBatch]:
    """Of sequences, each its credit and the ratio of each of its tokens. What only a model reads is empty."""
    lengths = [len(ratios) for _, ratios in sequences]
    credit_N = torch.tensor([credit for credit, ratios in sequences for _ in ratios], dtype=dtype)
    ratio_N = torch.tensor([ratio for _, ratios in sequences for ratio in ratios], dtype=dtype)
    logprobs_N = torch.linspace(-0.1, -4, len(ratio_N), dtype=dtype)
    nothing = torch.zeros(0, dtype=torch.long)
    unpacked = PackedRows((nothing, nothing, 0, 0, None), nothing, nothing)
    sequence_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    micro = MicroBatch(
        nothing, nothing, nothing, nothing, unpacked, nothing, nothing, credit_N, logprobs_N - ratio_N.log(),
        torch.zeros_like(sequence_N), torch.tensor(lengths, dtype=dtype)[sequence_N], sequence_N,
        torch.zeros(len(lengths), dtype=torch.long),
    )  # fmt: skip
    return scored(logprobs_N), micro


def scored(logprobs_N: Tensor) -> TokenLogprobs:
    """As a leaf."""
    leaf_N = logprobs_N.detach().clone().requires_grad_()
    return TokenLogprobs(leaf_N, torch.ones_like(leaf_N))
