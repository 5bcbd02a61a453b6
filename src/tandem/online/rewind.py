"""The way back: what a job that is not published must leave behind is what was there before it, bit for bit."""

from __future__ import annotations

from tandem.protocols import Optimizer


class Rewind:
    """The optimizer's state, and the bits that 16-bit weights lack, copied to the host. (Weights: updates.Held.)"""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in optimizer.state().items()}

    def back(self) -> None:
        self._optimizer.load(self._state)
