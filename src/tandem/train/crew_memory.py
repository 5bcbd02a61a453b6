"""Rank 0's end of `shared` where several ranks train: each rank trains in the memory of one of the engine's workers.

rank 0                                     every rank
the engine's reply has N handles
map: the handles                        -> maps its worker's memory, and moves its weights there
send                                    -> checks that they are there still, and announces the version to its worker
                                        <- where each tensor is, and with sync.digest its digest
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from tandem.protocols import WeightBridge, WeightSource
from tandem.train.crew import Crew
from tandem.types import Sent, WeightKind, Weights


class BridgeOfWorkers(WeightBridge, Protocol):
    """What this needs of bridge/shared."""

    @property
    def handles(self) -> Sequence[Mapping[str, Any]]: ...
    def joined(self, sent: Sent, proofs: Sequence[Mapping[str, str]]) -> Sent: ...


class CrewMemory:
    """The bridge as rank 0's publisher sees it."""

    def __init__(self, crew: Crew, bridge: BridgeOfWorkers) -> None:
        self.mode = bridge.mode
        self.carries: WeightKind = bridge.carries
        self._crew, self._bridge = crew, bridge
        self._weights: Weights | None = None
        self._sent: Sent | None = None
        crew.handle("send", self._send)

    def source(self, num_receivers: int = 1) -> WeightSource:
        return self._bridge.source(num_receivers)

    def storage(self) -> Mapping[str, Tensor] | None:
        self._crew.order("map", handles=self._bridge.handles)
        return self._bridge.storage()

    def send(self, weights: Weights) -> Sent:
        self._weights = weights
        proofs = self._crew.order("send", link={})
        assert self._sent is not None
        return self._bridge.joined(self._sent, proofs)

    def _send(self, link: Mapping[str, Any]) -> Mapping[str, str]:
        assert self._weights is not None
        weights, self._weights = self._weights, None
        self._sent = self._bridge.send(weights)
        return self._sent.fingerprints

    def close(self) -> None:
        self._bridge.close()
