"""Adafactor (arXiv 1804.04235) with torch's defaults: a second moment in rows and columns, and no first moment.

The learning rate is relative: a weight moves by the root mean square of its parameter (at least 1e-3) times lr, or
times 1 / sqrt(step) if that is less. So AdamW's 1e-5 is far too small; torch's default is 1e-2.

The formula is torch.optim.Adafactor's with eps = (1e-15, 1e-3), written out because torch's function, from 2.11 to
2.15, reads three numbers a parameter back from the device. It differs from torch's in two ways, as in the paper; with
gradients of O(1) neither shows. The row moment is divided by its mean first, and only zeros are clamped. With torch's
own eps of 1e-7, gradients below 3e-4, as in all large models, would make every update as long as the clip allows.

As in torch, a stack of matrices [experts, rows, columns] is factored by matrix, and moves like one parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.ops.byte_sizes import state_shapes
from tandem.optim.update_rule import ByParts, Slot
from tandem.spec.optim import AdafactorSpec

_LEAST_SQUARE = 1e-30
"""The smallest squared gradient; the paper's first epsilon."""
_LEAST_SIZE = 1e-3
"""The smallest size of a parameter, which could not leave zero otherwise; the paper's second epsilon."""


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
    """Return the mean square along `dim`, without a tensor of squares."""
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=True).square_().div_(tensor.shape[dim])
