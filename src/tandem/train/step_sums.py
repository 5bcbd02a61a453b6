"""Sums over the micro-batches of a step, read from the device once: who reads a number waits until all that was sent to
the device before it is computed, and the device then waits for what comes next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.types import Metrics


class StepSums:
    def __init__(self) -> None:
        self._parts: list[tuple[str, float | Tensor, float]] = []

    def add(self, sums: Mapping[str, float | Tensor], divisor: float = 1.0) -> None:
        for name, value in sums.items():
            self._parts.append((name, value.detach() if isinstance(value, Tensor) else value, divisor))

    def read(self) -> Metrics:
        """Return the sums; each is added up in 64 bits, in the order of `add`."""
        on_device = [value.double() for _, value, _ in self._parts if isinstance(value, Tensor)]
        numbers = iter(torch.stack(on_device).tolist() if on_device else ())
        found: Metrics = {}
        for name, value, divisor in self._parts:
            found[name] = found.get(name, 0.0) + (next(numbers) if isinstance(value, Tensor) else value) / divisor
        return found
