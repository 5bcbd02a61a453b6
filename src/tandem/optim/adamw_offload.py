"""AdamW whose moments are in the host's memory, and on the device only while they are needed.

Moments are copied in pieces of at most 16 MiB. While one piece is computed, the next one is copied to the device and
the previous one back, each on its own CUDA stream; the link carries both directions at once. On the device this takes
three pairs of buffers, 96 MiB. An update returns before the last pieces are on the host: synchronize the device before
the moments are read, or written, there.

    stream      waits for                                     records
    incoming    all copies back before this update;           arrived
                `left` of the buffer's previous piece
    current     `arrived`                                     computed
    outgoing    `computed`                                    left

The host's memory is pinned: otherwise copies would be slow and would not overlap. torch's allocator rounds the pinned
memory of each moment of a parameter up to a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.optim.adamw import AdamW
from tandem.optim.update_rule import ByParts, Slot
from tandem.spec.optim import AdamWOffloadSpec

_PIECE = 2**22
"""Numbers in a piece: enough for a copy at full speed, a third of a millisecond on PCIe 5."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWOffload(ByParts):
    by_rows = True

    def __init__(self, spec: AdamWOffloadSpec) -> None:
        self._adamw = AdamW(spec)
        self._line: _StreamPipeline | None = None

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]:
        if not like.is_cuda:
            return self._adamw.init(name, like)
        self._line = self._line or _StreamPipeline(like.device)
        return {moment: torch.zeros(like.shape, dtype=torch.float32, pin_memory=True) for moment in _MOMENTS}

    def update(self, slots: Sequence[Slot]) -> None:
        if self._line is None:
            self._adamw.update(slots)
            return
        self._line.start()
        for slot in slots:
            # AdamW knows no shapes, so pieces need not be rows: one row may be longer than a piece.
            flat = replace(slot, value=slot.value.reshape(-1), grad=slot.grad.reshape(-1))
            state = {moment: slot.state[moment].view(-1) for moment in _MOMENTS}
            for start in range(0, flat.value.numel(), _PIECE):
                part = slice(start, start + _PIECE)
                home = {moment: tensor[part] for moment, tensor in state.items()}
                self._line.run(self._adamw, replace(flat, value=flat.value[part], grad=flat.grad[part], state=home))
            if not slot.value.is_contiguous():
                slot.value.copy_(flat.value.view(slot.value.shape))


def why_not(device: torch.device) -> str:
    """Return why moments cannot be offloaded; empty if they can."""
    return "" if device.type == "cuda" else "the weights are in the host's memory themselves"


class _StreamPipeline:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.incoming, self.outgoing = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._buffers = [_Buffer(device) for _ in range(3)]
        self._turn = 0
        for moment in (moment for buffer in self._buffers for moment in buffer.moments.values()):
            moment.record_stream(self.incoming)
            moment.record_stream(self.outgoing)
        self.incoming.wait_stream(torch.cuda.current_stream(device))  # it may still use the buffers' memory

    def start(self) -> None:
        """Wait for the copies back to the host: a small parameter's moments may be read again at once."""
        self.incoming.wait_stream(self.outgoing)

    def run(self, adamw: AdamW, piece: Slot) -> None:
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        current = torch.cuda.current_stream(self._device)
        here = {moment: tensor[: piece.value.numel()] for moment, tensor in buffer.moments.items()}

        self.incoming.wait_event(buffer.left)
        with torch.cuda.stream(self.incoming):
            for moment, home in piece.state.items():
                here[moment].copy_(home, non_blocking=True)
        buffer.arrived.record(self.incoming)

        current.wait_event(buffer.arrived)
        adamw.update([replace(piece, state=here)])
        buffer.computed.record(current)

        self.outgoing.wait_event(buffer.computed)
        with torch.cuda.stream(self.outgoing):
            for moment, home in piece.state.items():
                home.copy_(here[moment], non_blocking=True)
        buffer.left.record(self.outgoing)


class _Buffer:
    """Device memory for a piece's moments, and the events of its three stages."""

    def __init__(self, device: torch.device) -> None:
        self.moments = {moment: torch.empty(_PIECE, dtype=torch.float32, device=device) for moment in _MOMENTS}
        self.arrived, self.computed, self.left = (torch.cuda.Event() for _ in range(3))
