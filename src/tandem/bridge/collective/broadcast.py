"""broadcast, the trainer's end."""

from __future__ import annotations

import torch

from tandem.bridge.collective.sender import CollectiveBridge
from tandem.bridge.collective.transport import Backend
from tandem.bridge.common.manifest import padded
from tandem.types import WeightKind

_BUCKET_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}


class BroadcastBridge(CollectiveBridge):
    mode = "broadcast"
    carries: WeightKind = "full"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        host: str = "127.0.0.1",
        bucket_bytes: int = 0,
        deadline_s: float = 60.0,
        backend: Backend = "auto",
        roomy: bool = False,
    ) -> None:
        """`host`: the trainer's address as engines reach it. `bucket_bytes`: 0 is what suits the device. `roomy`: an
        engine on the trainer's GPU has room there for a second copy of the weights while they come."""
        size = bucket_bytes or _BUCKET_BYTES[torch.device(device).type]
        super().__init__(device, host, padded(size), deadline_s, backend, roomy=roomy)
