"""Which device something is on, in words that two processes share."""

from __future__ import annotations

import torch


def device_name(device: torch.device) -> str:
    """`cpu`, or the GPU's UUID: its number may be another in each process."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
