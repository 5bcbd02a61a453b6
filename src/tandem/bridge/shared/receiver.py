"""The engine's end of `shared`: put its tensors where the trainer can map them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tandem.bridge.common.deadline import Deadline
from tandem.bridge.shared import cuda_ipc
from tandem.bridge.shared.memory import Segment, with_digests
from tandem.errors import SyncError
from tandem.ops import digest
from tandem.types import WeightKind, Weights

_POLL_S = 0.0005


class SharedEnd:
    carries: WeightKind = "live"

    def __init__(self, link: Mapping[str, Any]) -> None:
        self.link = link
        self.reply: dict[str, Any] = {}
        self._segment: Segment | None = None
        self._closed = threading.Event()
        self._tensors: Mapping[str, Tensor] = {}
        self._places: dict[str, str] = {}
        self._exported: dict[str, Any] = {}
        self._digests: digest.RepeatedDigest | None = None

    def reuse_buffer(self) -> bool:
        return False  # weights do not arrive: the trainer writes them in place

    def prefetch(self, rank: int = 0) -> None:
        """Do nothing: the weights are here already."""

    def verify_where_served(self) -> bool:
        return False

    def memory_for(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Share the engine's tensors. On a CPU they move into a segment; on a GPU they stay and are exported."""
        kinds = {tensor.device.type for tensor in tensors.values()}
        if kinds == {"cuda"}:
            self._segment = Segment.create(self.link["meeting"], {})
            self._exported = {"cuda": cuda_ipc.export(tensors)}
            self._tensors, numbers = tensors, cuda_ipc.numbers(tensors)
            self._places = {name: cuda_ipc.place(tensor, numbers) for name, tensor in tensors.items()}
        elif kinds == {"cpu"}:
            self._segment = Segment.create(self.link["meeting"], tensors)
            self._tensors = self._segment.tensors
            self._places = {name: self._segment.place(tensor) for name, tensor in self._tensors.items()}
        else:
            raise SyncError(f"shared: the engine's tensors are on {sorted(kinds)}; this mode needs one of cpu and cuda")
        return self._tensors

    def lend(self, tensors: Mapping[str, Tensor]) -> None:
        """Share these views of the memory that `memory_for` gave, in place of what it was asked for."""
        assert self._segment is not None
        self._segment.lend(tensors)
        self._tensors = tensors
        self._places = {name: self._segment.place(tensor) for name, tensor in tensors.items()}

    def attached(self, reply: Mapping[str, Any]) -> None:
        self.reply = dict(reply)
        if self._segment is not None:  # otherwise a worker of this engine shared them, and `reply` has its handles
            self.reply["handles"] = {**self._segment.handle, **self._exported}

    def receive(self, version: int, rank: int = 0) -> Weights:
        """Wait until the trainer announces the version: it has written the weights by then."""
        segment = self._segment
        assert segment is not None, "memory_for() comes first"
        deadline = Deadline("shared", self.link["deadline_s"], self._closed)
        deadline.until(
            lambda: segment.version >= version,
            f"version {version} was not announced",
            every_s=_POLL_S,
        )
        if segment.version != version:
            raise SyncError(f"shared: asked for version {version}, announced is {segment.version}")
        return Weights(version, "live", lambda: iter(self._tensors.items()), expected=self._proof())

    def _proof(self) -> Mapping[str, str]:
        """Return which memory is served; with `digest`, also its present content as this process reads it."""
        if not self.link.get("digest"):
            return self._places
        if self._digests is None:
            self._digests = digest.RepeatedDigest((name, self._tensors[name], 0, 0) for name in self._places)
        return with_digests(self._places, self._digests.take())

    def close(self) -> None:
        self._closed.set()  # ends the wait of a thread in receive()
        if self._segment is not None:
            self._segment.close()
