"""Adafactor (arXiv 1804.04235) with torch's defaults: a second moment in rows and columns, and no first one.

The learning rate is relative: a weight moves by lr times the root mean square of its parameter (at least 1e-3), and by
1 / sqrt(step) if that is less than lr. AdamW's 1e-5 is therefore far too small; torch's default is 1e-2.

The formula is torch.optim.Adafactor's with eps = (1e-15, 1e-3), written out because torch's function, from 2.11 to
2.15, reads three numbers a parameter back from the device. Two deviations, which O(1) gradients do not show: the
row's share of the mean is taken first and nothing but zeros is cut off, as in the paper. With torch's own eps of 1e-7
every update is cut to full size as soon as gradients are smaller than 3e-4, and a large model's all are.

A stack of matrices [experts, rows, columns] is factored by matrix, and moves like one parameter: as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.ops.byte_sizes import state_shapes
from tandem.optim.update_rule import ByParts, Slot
from tandem.spec.optim import AdafactorSpec

_LEAST_SQUARE = 1e-30
"""Of a gradient; the paper's first epsilon."""
_LEAST_SIZE = 1e-3
"""Of a parameter, which could not leave zero otherwise; the paper's second epsilon."""


class Adafactor(ByParts):
    by_rows = False

    def __init__(self, spec: AdafactorSpec) -> None:
        self._spec = spec

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]:
        shapes = state_shapes("adafactor", like.shape)
        return {key: torch.zeros(dims, dtype=torch.float32, device=like.device) for key, (dims, _) in shapes.items()}

    def update(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            length = _rms(slot.value).clamp_(min=_LEAST_SIZE).mul_(min(slot.lr, slot.step**-0.5))
            slot.value.mul_(1 - slot.lr * slot.decay)
            square = self._second_moment(slot)
            change = slot.grad.mul_(square.clamp_(min=_LEAST_SQUARE).rsqrt_())
            length.div_(_rms(change).div_(self._spec.clip).clamp_(min=1.0))
            slot.value.sub_(change.mul_(length))

    def _second_moment(self, slot: Slot) -> Tensor:
        newest = slot.step**self._spec.beta2_decay
        if slot.grad.ndim < 2:
            return slot.state["square"].lerp_(slot.grad.square(), newest).clone()
        row, column = slot.state["row_square"], slot.state["column_square"]
        row.lerp_(_mean_square(slot.grad, -1), newest)
        column.lerp_(_mean_square(slot.grad, -2), newest)
        return (row / row.mean(dim=-2, keepdim=True).clamp_(min=_LEAST_SQUARE)) @ column


def _rms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor) / tensor.numel() ** 0.5


def _mean_square(tensor: Tensor, dim: int) -> Tensor:
    """Without a tensor of squares."""
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=True).square_().div_(tensor.shape[dim])
