"""Kernels of a transfer, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.bridge.common.deadline import Deadline


class SideStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What was computed before is waited for."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def settle(self, what_failed: str, deadline: Deadline) -> None:
        """All that was enqueued here has happened, for other processes too."""
        if self._stream is not None:
            deadline.until(self._stream.record_event().query, what_failed)
