"""AdamW: torch's own, fused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tandem.optim.rule import Slot
from tandem.spec.optim import AdamWSpec


class AdamW:
    by_rows = True

    def __init__(self, spec: AdamWSpec) -> None:
        self._spec = spec

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]:
        return {moment: torch.zeros_like(like, dtype=torch.float32) for moment in ("exp_avg", "exp_avg_sq")}

    def update(self, slots: Sequence[Slot]) -> None:
        for (lr, decay), alike in groupby(slots, key=lambda slot: (slot.lr, slot.decay)):
            group = list(alike)
            before = torch.tensor([slot.step - 1.0 for slot in group], device=group[0].value.device)
            adamw(
                [slot.value for slot in group],
                [slot.grad for slot in group],
                [slot.state["exp_avg"] for slot in group],
                [slot.state["exp_avg_sq"] for slot in group],
                [],
                list(before.unbind()),  # counted on by the call
                fused=True,
                amsgrad=False,
                beta1=self._spec.betas[0],
                beta2=self._spec.betas[1],
                lr=lr,
                weight_decay=decay,
                eps=self._spec.eps,
                maximize=False,
            )
