"""Name a device in a form that two processes understand alike."""

from __future__ import annotations

import torch


def device_name(device: torch.device) -> str:
    """Return `cpu` or the GPU's UUID, because a GPU's number may differ between processes."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
