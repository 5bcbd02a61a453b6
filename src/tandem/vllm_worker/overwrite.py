"""Copy a full version over the served weights, in place, because captured graphs point at that memory.

Everything is checked before the first write, and every write is complete: when this returns, no fused parameter holds
parts of two versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.ops import digest
from tandem.ops.batched_copy import copy_all
from tandem.ops.parts import rows_and_cols
from tandem.types import Part
from tandem.vllm_worker.tensor_layout import TensorLayout

PieceDigest = tuple[str, int, int, int, int, int]
"""Name, rows from and to, columns from and to, digest."""


def check(layout: TensorLayout, arrived: Mapping[str, Tensor]) -> None:
    """Raise SyncError unless `arrived` has exactly the names, shapes and types that are served."""
    forms = layout.forms()
    if odd := sorted(forms.keys() ^ arrived.keys()):
        side = "did not arrive" if odd[0] in forms else f"is no weight of this model{_hint(layout, odd[0])}"
        raise SyncError(f"apply: '{odd[0]}' {side} ({len(odd)} of {len(forms)} names differ); nothing was written")
    for name, (dtype, shape) in forms.items():
        tensor = arrived[name]
        if (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) != (dtype, shape):
            raise SyncError(
                f"apply: '{name}' arrived as {tensor.dtype} {list(tensor.shape)} and is served as {dtype} {shape}; "
                "nothing was written"
            )
    for name in layout.tables():
        assert layout.rotary is not None
        layout.rotary.check_received(name, arrived[name])


Moves = list[tuple[Tensor, Tensor]]
"""Pairs of target and source."""


def moves(layout: TensorLayout, arrived: Mapping[str, Tensor]) -> Moves:
    """Return the copies that apply a version. Call after `check`, before the engine is paused."""
    return [(piece.view, piece.cut(arrived[piece.name])) for piece in layout]


def moves_of_parts(layout: TensorLayout, arrived: Sequence[Part]) -> Moves:
    """Return the copies that apply a version of which this worker got its boxes alone. SyncError, before anything is
    written, unless they are exactly those that it serves."""
    forms = layout.forms()
    found: dict[tuple[Any, ...], Tensor] = {}
    for name, tensor, row_start, col_start, full_shape in arrived:
        is_served = forms.get(name, ("nothing", []))
        if (str(tensor.dtype).removeprefix("torch."), list(full_shape)) != (is_served[0], list(is_served[1])):
            raise SyncError(
                f"apply: a box of '{name}' arrived as {tensor.dtype} of {list(full_shape)}, and is served as "
                f"{is_served[0]} {list(is_served[1])}; nothing was written"
            )
        rows, cols = rows_and_cols(tensor.shape)
        found[name, row_start, row_start + rows, col_start, col_start + cols] = tensor
    if odd := sorted(found.keys() ^ set(layout.boxes())):
        side = "is no box of this worker" if odd[0] in found else "did not arrive"
        name, *box = odd[0]
        raise SyncError(
            f"apply: '{name}', rows and columns {box}, {side} ({len(odd)} boxes differ); nothing was written"
        )
    for name in layout.tables():
        assert layout.rotary is not None
        layout.rotary.check_received(name, next(part.tensor for part in arrived if part.name == name))
    return [(piece.view, found[piece.name, *piece.box].view(piece.view.shape)) for piece in layout]


@torch.no_grad()
def write(layout: TensorLayout, arrived: Mapping[str, Tensor], moves: Moves) -> None:
    copy_all(moves)
    for name in layout.tables():
        assert layout.rotary is not None
        layout.rotary.adopt(arrived[name])
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the next forward pass may be on another stream


class ServedMemory:
    """Digests the served weights again and again. They never move, because captured graphs point at them."""

    def __init__(self, layout: TensorLayout) -> None:
        self._layout = layout
        self._boxes = [(piece.name, *piece.box) for piece in layout]
        derived = layout.derived()
        self._derived = [(name, right) for name, _, right in derived]
        of_layout: list[digest.Piece] = [(piece.name, piece.view, piece.row_start, piece.col_start) for piece in layout]
        of_derived: list[digest.Piece] = [(name, tensor, 0, 0) for name, tensor, _ in derived]
        self._digests = digest.RepeatedDigest([*of_layout, *of_derived])
        self._derived_digests = digest.RepeatedDigest(of_derived)

    def check_derived(self, numbers: Sequence[int] | None = None) -> None:
        """Raise SyncError if a derived tensor changed. `numbers`: the digests, if they were computed before."""
        found = self._derived_digests.take() if numbers is None else numbers
        for (name, right), number in zip(self._derived, found, strict=True):
            if number != right():
                raise SyncError(f"layout: '{name}' is not what this engine derived: it was overwritten")

    def pieces(self) -> list[PieceDigest]:
        """Compute the digests now, and check derived tensors."""
        numbers = self._digests.take()
        self.check_derived(numbers[len(self._boxes) :])
        found = [(*box, number) for box, number in zip(self._boxes, numbers[: len(self._boxes)], strict=True)]
        tables = [(name, tensor, 0, len(tensor), 0, 1) for name, tensor in self._layout.tables().items()]
        return [*found, *digests_of(tables)]


def digests_of(parts: Sequence[tuple[str, Tensor, int, int, int, int]]) -> list[PieceDigest]:
    """`parts`: name, tensor, rows from and to, columns from and to."""
    numbers = digest.pieces((name, tensor, top, left) for name, tensor, top, _, left, _ in parts)
    boxes = [(name, top, bottom, left, right) for name, _, top, bottom, left, right in parts]
    return [(*box, number) for box, number in zip(boxes, numbers, strict=True)]


def check_served(pieces: Iterable[PieceDigest], expected: Mapping[str, str], shapes: Mapping[str, Any]) -> None:
    """Raise SyncError if a digest that was read back differs from the one sent, for tensors that this worker holds
    whole."""
    whole = [
        (name, number)
        for name, top, bottom, left, right, number in pieces
        if name in expected and (top, left) == (0, 0) and [bottom, right] == _size(shapes[name])
    ]
    for name, number in whole:
        if digest.text(number) != expected[name]:
            raise SyncError(f"apply: '{name}' is served as {digest.text(number)} and was sent as {expected[name]}")


def _size(shape: list[int]) -> list[int]:
    cols = 1
    for length in shape[1:]:
        cols *= length
    return [shape[0], cols]


def _hint(layout: TensorLayout, name: str) -> str:
    return f": it is tied to '{layout.aliases[name]}'" if name in layout.aliases else ""
