"""A module that was loaded in float32 becomes one of bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def narrow(module: Any, device: torch.device, adopt: Callable[[str, Tensor], Tensor] | None) -> None:
    """Parameter by parameter, straight onto its device. `adopt(name, exact)` says what serves for an exact tensor, and
    may keep what that lacks; without it, frozen weights are rounded. Buffers stay as they are: a rotary table in bf16
    is another model."""
    for name, parameter in module.named_parameters():
        exact = parameter.data.to(device)
        parameter.data = adopt(name, exact) if adopt else exact.to(torch.bfloat16)
    module.config.dtype = torch.bfloat16
