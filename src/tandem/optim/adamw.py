"""AdamW: torch's fused function; on a GPU our kernel, which also reads, writes and counts in the same launch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tandem.ops.byte_sizes import state_shapes
from tandem.optim.update_rule import Slot, Whole
from tandem.spec.optim import AdamWSpec


class AdamW:
    by_rows = True

    def __init__(self, spec: AdamWSpec) -> None:
        self._spec = spec

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]:
        return {moment: torch.zeros_like(like, dtype=torch.float32) for moment in state_shapes("adamw", like.shape)}

    def why_not_whole(self, live: Tensor) -> str:
        if not live.is_cuda:
            return "the kernel is for GPUs"
        if find_spec("triton") is None:
            return "triton is not installed"
        return "" if live.is_contiguous() else "its memory has gaps"

    def update_whole(self, wholes: Sequence[Whole]) -> Tensor:
        from tandem.optim import adamw_triton  # triton exists where a GPU is

        return adamw_triton.update(wholes, self._spec)

    def update(self, slots: Sequence[Slot]) -> None:
        for (lr, decay, fused), alike in groupby(slots, key=lambda slot: (slot.lr, slot.decay, _contiguous(slot))):
            group = list(alike)
            adamw(
                [slot.value for slot in group],
                [slot.grad for slot in group],
                [slot.state["exp_avg"] for slot in group],
                [slot.state["exp_avg_sq"] for slot in group],
                [],
                # The call adds 1. Filled on the device: a copy from the host would wait for the device.
                [torch.full((), slot.step - 1.0, device=slot.value.device) for slot in group],
                fused=fused,
                foreach=not fused,
                amsgrad=False,
                beta1=self._spec.betas[0],
                beta2=self._spec.betas[1],
                lr=lr,
                weight_decay=decay,
                eps=self._spec.eps,
                maximize=False,
            )


def _contiguous(slot: Slot) -> bool:
    """Whether torch's fused kernel may be used: it assumes four contiguous tensors, and does not check."""
    return all(tensor.is_contiguous() for tensor in (slot.value, slot.grad, *slot.state.values()))
