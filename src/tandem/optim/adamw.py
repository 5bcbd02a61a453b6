"""AdamW: torch's own, fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.spec.optim import AdamWSpec


def make(named_parameters: Sequence[tuple[str, Tensor]], spec: AdamWSpec, lr: float) -> torch.optim.Optimizer:
    matrices = [tensor for _, tensor in named_parameters if tensor.ndim >= 2]
    vectors = [tensor for _, tensor in named_parameters if tensor.ndim < 2]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, betas=spec.betas, eps=spec.eps, fused=True
    )
