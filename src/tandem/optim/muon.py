"""Muon: torch's function. Hidden matrices move by their momentum with all its singular values made about one.

The update is scaled by 0.2 * sqrt(max(rows, columns)), so that its root mean square is AdamW's and AdamW's learning
rates transfer ("Muon is Scalable for LLM Training", arXiv 2502.16982). It is of that size whatever the gradient's is: a
matrix whose gradient has become zero goes on along its fading momentum at full length, one that never had any stays.

The function is torch's private one (the class cannot be given a value and a gradient that live elsewhere), with one
signature in torch 2.11, 2.13 and 2.15. A stack of matrices [experts, rows, columns] is that many matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import _muon

from tandem.ops.byte_sizes import state_shapes
from tandem.optim.update_rule import ByParts, Slot
from tandem.spec.optim import MuonSpec


class Muon(ByParts):
    by_rows = False

    def __init__(self, spec: MuonSpec) -> None:
        self._spec = spec

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]:
        assert like.ndim >= 2, f"Muon is for matrices, and '{name}' has the shape {tuple(like.shape)}"
        shapes = state_shapes("muon", like.shape)
        return {key: torch.zeros(dims, dtype=torch.float32, device=like.device) for key, (dims, _) in shapes.items()}

    def update(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            _muon.muon(
                _matrices(slot.value),
                _matrices(slot.grad),
                _matrices(slot.state["momentum"]),
                lr=slot.lr,
                weight_decay=slot.decay,
                momentum=self._spec.momentum,
                nesterov=True,
                ns_coefficients=(_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C),
                ns_steps=self._spec.newton_schulz_steps,
                eps=_muon.EPS,
                adjust_lr_fn="match_rms_adamw",
                has_complex=False,
            )


def _matrices(stack: Tensor) -> list[Tensor]:
    """Views, so that they are changed in place."""
    if stack.ndim == 2:
        return [stack]
    return [matrix for part in stack.unbind() for matrix in _matrices(part)]
