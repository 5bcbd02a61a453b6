"""adapter_broadcast, the trainer's end: an adapter is small, and goes in one flat buffer."""

from __future__ import annotations

import torch

from tandem.bridge.collective import CollectiveBridge
from tandem.bridge.way import Backend
from tandem.types import WeightKind


class AdapterBroadcastBridge(CollectiveBridge):
    mode = "adapter_broadcast"
    carries: WeightKind = "adapter"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        host: str = "127.0.0.1",
        deadline_s: float = 60.0,
        backend: Backend = "auto",
    ) -> None:
        """`host`: the trainer's address as engines reach it."""
        super().__init__(device, host, bucket_bytes=0, deadline_s=deadline_s, backend=backend)
