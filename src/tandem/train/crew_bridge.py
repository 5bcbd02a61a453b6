"""Rank 0's end of a bridge to which every rank sends its rows: a version is sent by an order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from tandem.protocols import WeightBridge, WeightSource
from tandem.train.crew import Crew
from tandem.types import Sent, WeightKind, Weights


class BridgeOfRanks(WeightBridge, Protocol):
    @property
    def rank_link(self) -> Mapping[str, Any]: ...  # how the other ranks take part in the present connection


class CrewBridge:
    """Sends the rows of all ranks. The other ranks do the same order with what they hold (build/crew.py)."""

    def __init__(self, crew: Crew, bridge: BridgeOfRanks) -> None:
        self.mode = bridge.mode
        self.carries: WeightKind = bridge.carries
        self._crew, self._bridge = crew, bridge
        self._weights: Weights | None = None
        crew.handle("send", self._send)

    def source(self, num_receivers: int = 1) -> WeightSource:
        return self._bridge.source(num_receivers)

    def storage(self) -> Mapping[str, Tensor] | None:
        return self._bridge.storage()

    def send(self, weights: Weights) -> Sent:
        self._weights = weights
        return self._crew.order("send", link=dict(self._bridge.rank_link))[0]

    def _send(self, link: Mapping[str, Any]) -> Sent:
        assert self._weights is not None
        weights, self._weights = self._weights, None
        return self._bridge.send(weights)

    def close(self) -> None:
        self._bridge.close()
