"""null: nobody serves, so nothing is carried (supervised stages)."""

from __future__ import annotations

from tandem.types import Weights


class NullBridge:
    mode = "null"

    def source(self, num_receivers: int = 1) -> NullSource:
        return NullSource()

    def send(self, weights: Weights) -> None:
        pass

    def close(self) -> None:
        pass


class NullSource:
    def receive(self, version: int, rank: int = 0) -> Weights:
        return Weights(version, "full", lambda: iter(()))
