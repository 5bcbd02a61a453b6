"""adapter_broadcast, the trainer's end: an adapter is small, and goes in one flat buffer."""

from __future__ import annotations

import torch

from tandem.bridge.collective.receiver import GroupSource
from tandem.bridge.collective.sender import CollectiveBridge
from tandem.bridge.collective.transport import Backend
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
        base_wanted: bool = False,
    ) -> None:
        """`host`: the trainer's address as engines reach it. `base_wanted`: engines are asked for the memory of
        the base that they serve, so that the trainer needs no copy of its own (bridge/shared/adapter_base.py)."""
        self._base_wanted = base_wanted
        super().__init__(device, host, bucket_bytes=0, deadline_s=deadline_s, backend=backend, roomy=True)

    def source(self, num_receivers: int = 1) -> GroupSource:
        source = super().source(num_receivers)
        if self._base_wanted:  # an engine's server knows no such key
            source.link = {**source.link, "base_wanted": True}
        return source
