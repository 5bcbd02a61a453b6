"""Convert a module that was loaded in float32 to bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.ops.unseen_bits import with_unseen_bits


@torch.no_grad()
def narrow(module: Any, device: torch.device, adopt: Callable[[str, Tensor], Tensor] | None) -> None:
    """Convert parameter by parameter, directly onto the device. `adopt(name, exact)` returns the 16-bit tensor for an
    exact one, and may keep the missing bits; without it, and if frozen, weights are rounded. Buffers are not changed:
    with a rotary table in bf16 it would be another model."""
    for name, parameter in module.named_parameters():
        exact = parameter.data.to(device)
        if adopt and parameter.requires_grad:
            parameter.data = adopt(name, with_unseen_bits(name, exact))
        else:
            parameter.data = exact.to(torch.bfloat16)
    module.config.dtype = torch.bfloat16
