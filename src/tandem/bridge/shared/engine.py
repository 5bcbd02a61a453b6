"""shared, the engine's end: its tensors move into memory that the trainer can map."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tandem.bridge.shared.memory import Segment
from tandem.errors import SyncError, SyncTimeout
from tandem.types import WeightKind, Weights

_POLL_S = 0.0005


def open(link: Mapping[str, Any]) -> SharedEnd:
    return SharedEnd(link)


class SharedEnd:
    carries: WeightKind = "live"

    def __init__(self, link: Mapping[str, Any]) -> None:
        self.link = link
        self.reply: dict[str, Any] = {}
        self._segment: Segment | None = None

    def house(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if odd := next((name for name, tensor in tensors.items() if tensor.device.type != "cpu"), None):
            raise SyncError(f"shared: '{odd}' is not in the host's memory; this engine shares that alone")
        self._segment = Segment.create(self.link["meeting"], tensors)
        return self._segment.tensors

    def attached(self, reply: Mapping[str, Any]) -> None:
        assert self._segment is not None, "house() comes first"
        self.reply = {**reply, "handles": self._segment.handle}

    def receive(self, version: int, rank: int = 0) -> Weights:
        """The trainer has written already; it says so by announcing the version."""
        segment = self._segment
        assert segment is not None, "house() comes first"
        give_up = time.monotonic() + self.link["deadline_s"]
        while segment.version < version:
            if time.monotonic() > give_up:
                raise SyncTimeout(
                    f"shared: version {version} was not announced within {self.link['deadline_s']:g} s; the last one "
                    f"was {segment.version}"
                )
            time.sleep(_POLL_S)
        if segment.version != version:
            raise SyncError(f"shared: asked for version {version}, announced is {segment.version}")
        places = {name: segment.place(tensor) for name, tensor in segment.tensors.items()}
        return Weights(version, "live", lambda: iter(segment.tensors.items()), expected=places)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
