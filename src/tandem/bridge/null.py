"""The bridge `null`, for supervised stages: there is no engine, so it sends nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tandem.types import Sent, WeightKind, Weights


class NullBridge:
    mode = "null"
    carries: WeightKind = "live"

    def source(self, num_receivers: int = 1) -> NullSource:
        return NullSource()

    def storage(self) -> Mapping[str, Tensor] | None:
        return None

    def send(self, weights: Weights) -> Sent:
        return Sent(weights.version, self.mode, {}, how="none")

    def close(self) -> None:
        pass


class NullSource:
    carries: WeightKind = "live"
    link: Mapping[str, Any] = {}

    def attached(self, reply: Mapping[str, Any]) -> None:
        pass

    def memory_for(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        return None

    def receive(self, version: int, rank: int = 0) -> Weights:
        return Weights(version, "live", lambda: iter(()))

    def close(self) -> None:
        pass
