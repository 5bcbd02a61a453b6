"""How much of a GPU each part of a job took at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tandem.types import Metrics

_GIB = 2**30


class PeakMemory:
    """Beside a GPU's tensors; of a CPU's it says nothing."""

    def __init__(self, like: Tensor) -> None:
        self._device = like.device if like.is_cuda else None
        self._gib: dict[str, float] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Whatever torch had allocated meanwhile, at most. A part that ends with an error counts, too."""
        if self._device is None:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            self._gib[what] = torch.cuda.max_memory_allocated(self._device) / _GIB

    def metrics(self) -> Metrics:
        """The last of each part; `reserved` is what torch keeps, and `allocated` what is in use, at this moment."""
        if self._device is None:
            return {}
        found = {f"memory/peak_{what}": gib for what, gib in self._gib.items()}
        found["memory/allocated"] = torch.cuda.memory_allocated(self._device) / _GIB
        found["memory/reserved"] = torch.cuda.memory_reserved(self._device) / _GIB
        return found
