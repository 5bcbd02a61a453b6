"""Forward a weight source between a bridge and an engine, and record the engines' replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tandem.protocols import WeightSource
from tandem.types import WeightKind, Weights

if TYPE_CHECKING:
    from torch import Tensor


class Relay:
    """A weight source that forwards every call to another one."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.replies: list[Mapping[str, Any]] = []

    @property
    def carries(self) -> WeightKind:
        return self._source.carries

    @property
    def link(self) -> Mapping[str, Any]:
        return self._source.link

    def memory_for(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        return self._source.memory_for(tensors)

    def attached(self, reply: Mapping[str, Any]) -> None:
        self.replies.append(reply)

    def receive(self, version: int, rank: int = 0) -> Weights:
        return self._source.receive(version, rank)

    def close(self) -> None:
        self._source.close()
