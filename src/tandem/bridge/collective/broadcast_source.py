"""broadcast, the engine's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tandem.bridge.collective.receiver import GroupSource


def open(link: Mapping[str, Any], device: torch.device | None = None) -> GroupSource:
    """`device`: where weights arrive; without one, the thread's current GPU, or the CPU."""
    return GroupSource(link, "broadcast", "full", device)
