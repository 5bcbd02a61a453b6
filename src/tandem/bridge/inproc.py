"""inproc: engine and trainer share one module. No byte moves; what is checked is that it really is one module."""

from __future__ import annotations

import queue

from tandem.errors import SyncError, SyncTimeout
from tandem.types import Weights


class InprocBridge:
    mode = "inproc"

    def __init__(self, deadline_s: float = 60.0) -> None:
        self._deadline_s = deadline_s
        self._sources: list[InprocSource] = []

    def source(self, num_receivers: int = 1) -> InprocSource:
        source = InprocSource(num_receivers, self._deadline_s)
        self._sources.append(source)
        return source

    def send(self, weights: Weights) -> None:
        for source in self._sources:
            source.offer(weights)

    def close(self) -> None:
        self._sources.clear()


class InprocSource:
    """Hands each receiver the weights of one send."""

    def __init__(self, num_receivers: int, deadline_s: float) -> None:
        self._num_receivers, self._deadline_s = num_receivers, deadline_s
        # Not SimpleQueue: where two wait and one is served as the other's time runs out, the other waits for ever.
        self._offers: list[queue.Queue[Weights]] = [queue.Queue() for _ in range(num_receivers)]

    def offer(self, weights: Weights) -> None:
        for inbox in self._offers:
            inbox.put(weights)

    def receive(self, version: int, rank: int = 0) -> Weights:
        try:
            while (weights := self._offers[rank].get(timeout=self._deadline_s)).version < version:
                pass  # left over from a receive that never came
        except queue.Empty:
            raise SyncTimeout(f"inproc: version {version} was not sent within {self._deadline_s:g} s") from None
        if weights.version != version:
            raise SyncError(f"inproc: asked for version {version}, sent was {weights.version}")
        return weights
