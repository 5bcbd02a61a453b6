"""The shape of a model whose layers no formula here describes: its tensors and its forward pass, as they were counted.

model/meta_count.py counts them on torch's meta device, which computes shapes and no values. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from tandem.ops.byte_sizes import Dims, ModelShape
from tandem.spec.model import LoraSpec


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a micro-batch: some however small it is, some for each token, and some for each position that a token's
    row has."""

    fixed: float = 0.0
    token: float = 0.0
    pair: float = 0.0

    def bytes(self, tokens: float, row: int) -> float:
        return self.fixed + tokens * (self.token + self.pair * row)


@dataclass(frozen=True, slots=True)
class LayerCount:
    """What one layer has in a forward pass, or all that is beside the layers."""

    saved: Size = Size()
    """Saved for the backward pass."""
    repeated: Size = Size()
    """By which keys and values grow under a mask, where they are repeated for each head."""
    attends: bool = False
    """It has attention that takes a mask."""
    products: Size = Size()
    """Outputs of matrix products and of attention, which selective recomputation keeps."""
    compiled: Size = Size()
    """Inputs and outputs of products and of attention, which a compiled layer keeps."""
    compiled_least: Size = Size()
    """The same without inputs of products alone, which a compiled layer can recompute."""
    widest: Size = Size()
    """The largest tensor that is saved."""


@dataclass(frozen=True, slots=True)
class PassCount:
    """A forward pass, as counted."""

    layers: Sequence[LayerCount]
    root: LayerCount
    products: float
    """Multiplications of a token in matrix products."""
    heads: float
    """Numbers of all attention heads of a token."""


@dataclass(frozen=True, slots=True)
class CountedShape:
    """Has what a plan asks of a ModelShape, whose names have the same meaning here."""

    vocab: int
    hidden: int
    context: int
    numbers: Mapping[str, int]
    each_layer: Sequence[Sequence[Dims]]
    root: Sequence[Dims]
    linear_numbers: int
    recurrent: bool
    """Some layers read their row from its left."""
    masks: bool
    """What attention keeps grows with a row of one sequence, too, where rows are not packed."""
    packs: bool
    """The kernel for packed rows supports its attention."""
    trained: Callable[[LoraSpec | None], Sequence[tuple[Dims, bool]]]
    """Returns the dimensions of every trained tensor, and whether a matrix's optimizer updates it."""
    count: Callable[[int, LoraSpec | None], PassCount]
    """Counts a forward pass, by the bytes of a number and the adapters."""
    cached: Callable[[int], tuple[int, int]]
    """Returns the bytes of keys and values of a token, and of a sequence's states, in the embedded engine."""
    why_not_rows: str
    """Why several ranks cannot hold its rows; empty if they can."""
    teacher: int = 0
    tower: ClassVar = 0
    pixels: ClassVar = 0

    @property
    def layers(self) -> int:
        return len(self.each_layer)

    @property
    def total(self) -> int:
        return sum(self.numbers.values())

    @property
    def held(self) -> int:
        return self.total

    @property
    def large(self) -> Sequence[Dims]:
        return [*self.root, *(dims for layer in self.each_layer for dims in layer)]

    def position_bytes(self, width: int) -> int:
        return self.cached(width)[0]

    def state_bytes(self, width: int) -> int:
        return self.cached(width)[1] if self.recurrent else 0


Shape: TypeAlias = ModelShape | CountedShape
