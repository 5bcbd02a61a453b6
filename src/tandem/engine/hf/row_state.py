"""What the embedded engine knows of each row, on the device. Live rows are first; the memory of all of them stays.

Shapes: S rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.hf.admission_queue import QueuedRequest
from tandem.engine.hf.sampler import Settings


class RowState:
    def __init__(self, rows: int, device: torch.device) -> None:
        self.settings = Settings.empty(rows, device)
        state_4S = torch.zeros(4, rows, dtype=torch.long, device=device)
        self.last_S, self.position_S, self.shift_S, self.drawn_S = state_4S
        """The newest token; its place in the kv cache; how much later than that place the rotary embedding has it,
        which is not 0 behind an image; how many tokens were drawn."""

    def begin(self, first: int, requests: Sequence[QueuedRequest], lengths_S: Tensor, shifts_S: Tensor) -> None:
        """Fill rows from `first` on with requests whose prompts, so far, have these lengths and shifts."""
        rows = slice(first, first + len(requests))
        self.position_S[rows], self.shift_S[rows] = lengths_S, shifts_S
        self.drawn_S[rows] = torch.tensor([len(request.ids) for request in requests], device=lengths_S.device)
        values = zip(
            *((s.temperature, s.top_p, s.top_k, s.seed % 2**63) for s in (request.sampling for request in requests)),
            strict=True,
        )
        for tensor, column in zip(self.settings.tensors(), values, strict=True):
            tensor[rows] = torch.tensor(column, dtype=tensor.dtype, device=lengths_S.device)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        for tensor in (*self.settings.tensors(), self.last_S, self.position_S, self.shift_S, self.drawn_S):
            tensor[targets] = tensor[sources]
