"""shared, the engine's end: its tensors are where the trainer can map them."""

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
        self._standing: digest.RepeatedDigest | None = None

    def arrive_in_one_place(self) -> bool:
        return False  # nothing arrives

    def look_ahead(self, rank: int = 0) -> None:
        """There is nothing to be looked for: it is here."""

    def looks_itself(self) -> bool:
        return False

    def house(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A CPU's move into a segment; a GPU's stay where they are, and are exported."""
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

    def attached(self, reply: Mapping[str, Any]) -> None:
        self.reply = dict(reply)
        if self._segment is not None:  # or else a worker of this engine has housed them, and `reply` holds its handles
            self.reply["handles"] = {**self._segment.handle, **self._exported}

    def receive(self, version: int, rank: int = 0) -> Weights:
        """The trainer has written already; it says so by announcing the version."""
        segment = self._segment
        assert segment is not None, "house() comes first"
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
        """Which memory it is; and, if that is asked for, what lies there now, as this process sees it."""
        if not self.link.get("digest"):
            return self._places
        if self._standing is None:
            self._standing = digest.RepeatedDigest((name, self._tensors[name], 0, 0) for name in self._places)
        return with_digests(self._places, self._standing.take())

    def close(self) -> None:
        self._closed.set()  # who waits for a version on a thread of its own need not wait any longer
        if self._segment is not None:
            self._segment.close()
