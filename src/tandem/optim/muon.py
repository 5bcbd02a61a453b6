"""Muon: torch's function. Hidden matrices move by their momentum, with all its singular values set to about one.

The update is scaled by 0.2 * sqrt(max(rows, columns)), so that its root mean square is AdamW's and AdamW's learning
rates transfer ("Muon is Scalable for LLM Training", arXiv 2502.16982). Its size does not depend on the gradient's: a
matrix whose gradient has become zero moves on along its fading momentum at full length; one that never had a gradient
stays.

The function is torch's private one, because torch's class only takes its own parameters and gradients; its signature is
the same in torch 2.11, 2.13 and 2.15. A stack of matrices [experts, rows, columns] is that many matrices.

If each rank has only some rows, only the middle of the function needs whole matrices: their owner computes it
(by_owner.py). 16 bits a number, as in the function itself, are sent to the owner and back. The momentum stays with the
rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import _muon

from tandem.ops.byte_sizes import state_shapes
from tandem.optim.by_owner import Owners
from tandem.optim.update_rule import ByParts, RowCut, Slot
from tandem.spec.optim import MuonSpec

_COEFFICIENTS = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
_LENGTH = "match_rms_adamw"
WIRE = torch.bfloat16


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
                ns_coefficients=_COEFFICIENTS,
                ns_steps=self._spec.newton_schulz_steps,
                eps=_muon.EPS,
                adjust_lr_fn=_LENGTH,
                has_complex=False,
            )


class MuonByOwner(Muon):
    """Computes the same function in three parts, the middle one on the owner."""

    def __init__(self, spec: MuonSpec, owners: Owners) -> None:
        super().__init__(spec)
        self._owners, self.rounds = owners, owners.rounds

    def cut(self, name: str) -> dict[str, RowCut]:
        shape = self._owners.shapes[name]
        return {"momentum": RowCut(self._owners.rows(name, shape)[0], shape)}

    def most_numbers(self) -> int:
        return self._owners.most_numbers()

    def update(self, slots: Sequence[Slot]) -> None:
        raise NotImplementedError("all ranks update a round together: update_round")

    def update_round(self, number: int, slots: Sequence[Slot]) -> None:
        rows = {slot.name: self._ahead(slot) for slot in slots}
        owned = self.rounds[number][self._owners.rank]
        whole = self._owners.gather(number, rows, self._owners.shapes[owned] if owned in rows else None)
        self._owners.scatter(number, None if whole is None else self._orthogonal(whole), rows)
        for slot in slots:
            length = _muon._adjust_lr(slot.lr, _LENGTH, torch.Size(self._owners.shapes[slot.name][-2:]))
            slot.value.mul_(1 - slot.lr * slot.decay)
            slot.value.add_(rows[slot.name], alpha=-length)

    def _ahead(self, slot: Slot) -> Tensor:
        """Return Nesterov's momentum."""
        momentum = slot.state["momentum"].lerp_(slot.grad, 1 - self._spec.momentum)
        return slot.grad.lerp(momentum, self._spec.momentum).to(WIRE)

    def _orthogonal(self, whole: Tensor) -> Tensor:
        found = torch.empty_like(whole)
        for matrix, result in zip(_matrices(whole), _matrices(found), strict=True):
            steps = self._spec.newton_schulz_steps
            result.copy_(_muon._zeropower_via_newtonschulz(matrix, _COEFFICIENTS, steps, _muon.EPS))
        return found


def _matrices(stack: Tensor) -> list[Tensor]:
    """Return the matrices of a stack as views, so that they are changed in place."""
    if stack.ndim == 2:
        return [stack]
    return [matrix for part in stack.unbind() for matrix in _matrices(part)]
