"""The bridge `inproc`: engine and trainer share one module. No byte moves; the proof is that it is one module."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from tandem.errors import SyncError, SyncTimeout
from tandem.ops.named_tensors import whereabouts
from tandem.types import Sent, WeightKind, Weights


class InprocBridge:
    mode = "inproc"
    carries: WeightKind = "live"

    def __init__(self, deadline_s: float = 60.0) -> None:
        self._deadline_s = deadline_s
        self._source: InprocSource | None = None

    def source(self, num_receivers: int = 1) -> InprocSource:
        self._source = InprocSource(num_receivers, self._deadline_s)
        return self._source

    def storage(self) -> Mapping[str, Tensor] | None:
        return None

    def send(self, weights: Weights) -> Sent:
        where = {name: whereabouts(tensor) for name, tensor in weights.tensors()}
        if self._source is not None:
            self._source.offer(replace(weights, expected=where))
        return Sent(weights.version, self.mode, where, how="identity")

    def close(self) -> None:
        self._source = None


class InprocSource:
    """Gives each receiver the weights of one send."""

    carries: WeightKind = "live"
    link: Mapping[str, Any] = {}

    def __init__(self, num_receivers: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # Not SimpleQueue: if two threads wait and one gets an item as the other times out, the other waits for ever.
        self._offers: list[queue.Queue[Weights]] = [queue.Queue() for _ in range(num_receivers)]

    def attached(self, reply: Mapping[str, Any]) -> None:
        pass

    def memory_for(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        return None

    def close(self) -> None:
        pass

    def offer(self, weights: Weights) -> None:
        for inbox in self._offers:
            inbox.put(weights)

    def receive(self, version: int, rank: int = 0) -> Weights:
        try:
            while (weights := self._offers[rank].get(timeout=self._deadline_s)).version < version:
                pass  # an earlier send that was never received
        except queue.Empty:
            raise SyncTimeout(f"inproc: version {version} was not sent within {self._deadline_s:g} s") from None
        if weights.version != version:
            raise SyncError(f"inproc: asked for version {version}, sent was {weights.version}")
        return weights
