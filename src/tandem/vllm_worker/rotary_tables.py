"""The table of rotary embeddings: derived, so it is recomputed and compared rather than believed.

vLLM keeps cosines and sines by position, a trainer the frequencies that they come from. A version brings the trainer's
frequencies; they must be this engine's own.
P positions, F frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.ops import digest

ROTARY_NAMES = ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")
_NEAR = 1e-6  # relative; two builds of one formula differ in the last bit, two settings of it by far more


class Rotary:
    CLASSES: ClassVar = ("RotaryEmbedding", "Llama3RotaryEmbedding")
    """Those whose table is the cosine and sine of position times frequency, and no more."""

    def __init__(self, path: str, layer: Any) -> None:
        self._path, self._layer = path, layer
        with torch.device("cpu"):  # where a trainer makes its own
            self.inv_freq: Tensor = layer._compute_inv_freq(layer.base).float()
        self._compare()
        self._digest = self._table_digest()

    def is_of(self, layer: Any) -> bool:
        return layer is self._layer  # vLLM keeps one for all layers of one setting

    def buffers(self) -> Iterator[Tensor]:
        return self._layer.buffers(recurse=False)

    def table(self) -> tuple[str, Tensor, Callable[[], int]]:
        """Its name, where it lies, and the digest that it must have now."""
        return self._path, self._layer.cos_sin_cache, lambda: self._digest

    def check_received(self, name: str, inv_freq: Tensor) -> None:
        theirs = inv_freq.detach().cpu().float()
        if theirs.shape != self.inv_freq.shape or not torch.allclose(theirs, self.inv_freq, rtol=_NEAR, atol=0.0):
            raise SyncError(
                f"rotary: '{name}' is not what this engine computes from its configuration (base {self._layer.base}): "
                "trainer and engine were given different rotary settings, and would compute different models"
            )

    def adopt(self, inv_freq: Tensor) -> None:
        """From now on the table is of these very frequencies, down to their last bit."""
        theirs = inv_freq.detach().cpu().float()
        if not torch.equal(theirs, self.inv_freq):
            self.inv_freq = theirs.clone()
            self._layer.cos_sin_cache.copy_(self._table())
            self._digest = self._table_digest()

    def _table(self) -> Tensor:
        positions_P = torch.arange(self._layer.cos_sin_cache.shape[0], dtype=torch.float32)
        angles_PF = torch.outer(positions_P, self.inv_freq)
        return torch.cat((angles_PF.cos(), angles_PF.sin()), dim=-1)

    def _compare(self) -> None:
        table, ours = self._layer.cos_sin_cache, self._table()
        if ours.shape != table.shape:
            raise SyncError(f"rotary: '{self._path}' has a table of {list(table.shape)}, not {list(ours.shape)}")
        # The served type rounds; and an angle of so many turns has so few bits left behind the point.
        slack = torch.finfo(table.dtype).eps + 4 * torch.finfo(torch.float32).eps * len(ours)
        gap = (table.detach().cpu().float() - ours).abs().max().item()
        if not gap <= slack:
            raise SyncError(f"rotary: the table of '{self._path}' is {gap:.2g} away from what its frequencies give")

    def _table_digest(self) -> int:
        return digest.piece(self._layer.cos_sin_cache, self._path)
