"""A full version into the memory that is served, in place: captured graphs go on pointing at it.

Nothing is written before everything has been looked at, and every write is whole: a fused parameter never holds parts
of two versions when this returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.inside.layout import Layout
from tandem.ops import digest

PieceDigest = tuple[str, int, int, int, int, int]
"""Name, rows from and to, columns from and to, digest."""


def check(layout: Layout, arrived: Mapping[str, Tensor]) -> None:
    """SyncError unless `arrived` is exactly what is served: every name, every shape, every type."""
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


@torch.no_grad()
def write(layout: Layout, arrived: Mapping[str, Tensor]) -> None:
    """After `check`."""
    for piece in layout:
        piece.view.copy_(piece.cut(arrived[piece.name]))
    for name in layout.tables():
        assert layout.rotary is not None
        layout.rotary.adopt(arrived[name])
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the next forward pass may be on another stream


def served_pieces(layout: Layout) -> list[PieceDigest]:
    """Computed now, from the memory that forward passes read."""
    layout.check_derived()
    parts = [(piece.name, piece.view, *piece.box) for piece in layout]
    parts += [(name, tensor, 0, len(tensor), 0, 1) for name, tensor in layout.tables().items()]
    return digests_of(parts)


def digests_of(parts: Sequence[tuple[str, Tensor, int, int, int, int]]) -> list[PieceDigest]:
    """`parts`: name, what lies there, rows from and to, columns from and to."""
    numbers = digest.pieces((name, tensor, top, left) for name, tensor, top, _, left, _ in parts)
    boxes = [(name, top, bottom, left, right) for name, _, top, bottom, left, right in parts]
    return [(*box, number) for box, number in zip(boxes, numbers, strict=True)]


def check_served(pieces: Iterable[PieceDigest], expected: Mapping[str, str], shapes: Mapping[str, Any]) -> None:
    """What is read back is what was sent, wherever this worker alone holds all of a tensor."""
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


def _hint(layout: Layout, name: str) -> str:
    return f": it is tied to '{layout.aliases[name]}'" if name in layout.aliases else ""
