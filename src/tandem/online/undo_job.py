"""The way back: what a job that is not published must leave behind is what was there before it, bit for bit."""

from __future__ import annotations

from torch import Tensor

from tandem.ops.module_tensors import Copies
from tandem.protocols import Optimizer


class UndoJob:
    """The optimizer's state, and the bits that 16-bit weights lack, copied to the host: into memory that is kept from
    job to job. (Weights: updates.Held.)"""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._copies = optimizer, Copies()
        self._state: dict[str, Tensor] = {}

    def mark(self) -> None:
        """The way back leads here from now on."""
        self._state = self._copies.of(self._optimizer.state())

    def back(self) -> None:
        self._optimizer.load(self._state)
