"""Map each tensor of a checkpoint to the memory that vLLM serves it from; overwrite and digest that memory.

The layout is read from vLLM's classes of layers (layer_readers.py). Every element of every parameter and buffer must be
accounted for, or the model is refused.

What both compute from the configuration (derived_tensors.py) is compared, and computed again where it was overwritten.

Rows are the first dimension, columns all others together; a vector is one column.

A full version is copied over the served weights in place, because captured graphs point at that memory. Everything is
checked before the first write, and every write is complete: no fused parameter ever holds parts of two versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.common.manifest import name_of
from tandem.errors import SyncError
from tandem.ops import digest
from tandem.ops.batched_launches import copy_all
from tandem.ops.parts import rows_and_cols
from tandem.types import Part
from tandem.vllm_worker.derived_tensors import Derived, OtherForm
from tandem.vllm_worker.fixed_settings import check_settings
from tandem.vllm_worker.layer_readers import LayoutWalk, TensorPiece, checkpoints_names, reader_of, walk_of

_SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")


@dataclass(frozen=True)
class TensorLayout:
    pieces: Mapping[str, list[TensorPiece]]
    aliases: Mapping[str, str]
    """Other names of the same memory (tied weights): they are neither sent nor written."""
    computed: Sequence[Derived]
    scales: Mapping[str, Tensor]
    """Of quantised attention. Here it is not quantised: each is 1."""

    def __iter__(self) -> Iterator[TensorPiece]:
        return (piece for pieces in self.pieces.values() for piece in pieces)

    def forms(self) -> dict[str, tuple[str, list[int]]]:
        """Return dtype and shape by name of everything that a full version contains."""
        forms = {name: (name_of(parts[0].view.dtype), list(parts[0].full_shape)) for name, parts in self.pieces.items()}
        return forms | {name: (name_of(tensor.dtype), list(tensor.shape)) for name, tensor in self.tables().items()}

    def boxes(self) -> list[tuple[str, int, int, int, int]]:
        """Return name, rows from and to, columns from and to of everything that this worker needs of a full version."""
        tables = [(name, *_whole_box(tensor)) for name, tensor in self.tables().items()]
        return [*dict.fromkeys((piece.name, *piece.box) for piece in self), *tables]

    def tables(self) -> dict[str, Tensor]:
        """Return the tensors that the engine computes itself, under the trainer's names."""
        return {name: tensor for each in self.computed for name, tensor in each.named().items()}

    def of_other_form(self) -> list[str]:
        """Return the names of tensors that are trained, and served in another form."""
        return [name for each in self.computed if isinstance(each, OtherForm) for name in each.named()]

    def derived(self) -> list[tuple[str, Tensor, Callable[[], int]]]:
        """Return the tensors that are never sent: name, memory, and a function that gives the digest it must have."""
        found = [(name, scale, partial(_digest_of_ones, name, scale.shape)) for name, scale in self.scales.items()]
        return [*found, *(each.table() for each in self.computed)]


def layout_of(model: Any) -> TensorLayout:
    """Return the layout of `model`. SyncError, with its name, for any part that is unknown."""
    check_settings(model)
    fused, found = checkpoints_names(model), walk_of(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if (read := reader_of(path, module)) is not None:
            read(found, path, module, fused)
    _check_whole(model, found)
    _check_scales(found)
    return TensorLayout(found.pieces, found.aliases, list(found.derived.values()), found.scales)


# --- checks of the whole


def _check_whole(model: Any, found: LayoutWalk) -> None:
    for path, param in model.named_parameters(remove_duplicate=False):
        if path not in found.alias_paths and found.held.get(path, 0) != param.numel():
            raise SyncError(f"layout: of '{path}' {found.held.get(path, 0)} of {param.numel()} elements are known")
    computed = {id(buffer) for each in found.derived.values() for buffer in each.buffers()}
    for path, buffer in model.named_buffers(remove_duplicate=False):
        scale = path in found.scales and path.rpartition(".")[2] in _SCALES
        if not scale and path not in found.derived_paths and id(buffer) not in computed:
            raise SyncError(f"layout: the buffer '{path}' is not known")


def _check_scales(found: LayoutWalk) -> None:
    """Check that all are 1. Later changes are found by their digests (ServedMemory)."""
    scales = [scale.detach().reshape(-1).float() for scale in found.scales.values()]
    if scales and torch.cat(scales).tolist() != [1.0] * len(scales):  # one wait for the GPU
        name, scale = next((n, s.tolist()) for n, s in found.scales.items() if s.numel() != 1 or float(s) != 1.0)
        raise SyncError(f"layout: '{name}' is {scale}, not 1: attention is quantised or damaged")


@cache
def _digest_of_ones(name: str, shape: torch.Size) -> int:
    return digest.piece(torch.ones(shape, dtype=torch.float32), name)


# --- a full version


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
        if (name_of(tensor.dtype), list(tensor.shape)) != (dtype, shape):
            raise SyncError(
                f"apply: '{name}' arrived as {tensor.dtype} {list(tensor.shape)} and is served as {dtype} {shape}; "
                "nothing was written"
            )
    for each in layout.computed:
        for name in each.named():
            each.check_received(name, arrived[name])


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
        if (name_of(tensor.dtype), list(full_shape)) != (is_served[0], list(is_served[1])):
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
    for each in layout.computed:
        for name in each.named():
            each.check_received(name, next(part.tensor for part in arrived if part.name == name))
    return [(piece.view, found[piece.name, *piece.box].view(piece.view.shape)) for piece in layout]


@torch.no_grad()
def write(layout: TensorLayout, arrived: Mapping[str, Tensor], moves: Moves) -> None:
    copy_all(moves)
    for each in layout.computed:
        for name in each.named():
            each.adopt(name, arrived[name])
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
        tables = [(name, tensor, *_whole_box(tensor)) for name, tensor in self._layout.tables().items()]
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
        if name in expected and (top, left) == (0, 0) and (bottom, right) == rows_and_cols(shapes[name])
    ]
    for name, number in whole:
        if digest.text(number) != expected[name]:
            raise SyncError(f"apply: '{name}' is served as {digest.text(number)} and was sent as {expected[name]}")


def _whole_box(tensor: Tensor) -> tuple[int, int, int, int]:
    rows, cols = rows_and_cols(tensor.shape)
    return 0, rows, 0, cols


def _hint(layout: TensorLayout, name: str) -> str:
    return f": it is tied to '{layout.aliases[name]}'" if name in layout.aliases else ""
