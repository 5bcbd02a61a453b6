"""What one rank of a trainer holds: its rows of every tensor, and what it has whole for a while (model/rows.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from tandem.ops.byte_sizes import Dims, keeps_gathered, sums_of_ranks
from tandem.ops.counted_shape import Shape
from tandem.ops.parts import rows_of
from tandem.spec.parallel import ParallelSpec, settled
from tandem.spec.run import RlSpec, RunSpec

_TOGETHER = 2
"""Layers whose weights are whole at once: the one at work, and the next one, which is gathered meanwhile."""


@dataclass(frozen=True, slots=True)
class Rank:
    """`number` counts from 0. A trainer of one process is rank 0 of 1."""

    number: int = 0
    count: int = 1
    row_shards: int = 1
    """Into how many runs of rows a tensor is cut; ranks that are so far apart hold the same rows."""
    gather: str = "layer"
    sums: str = "round"
    in_engine: bool = False
    """It trains in the memory of an engine's worker on its GPU, and has vectors whole."""

    @classmethod
    def of(cls, spec: RunSpec, number: int) -> Rank:
        parallel = settled(spec.parallel, deterministic=spec.deterministic)
        shared = isinstance(spec, RlSpec) and spec.sync.traits.shares_memory and parallel.ranks > 1
        return cls(number, parallel.ranks, parallel.row_shards, parallel.gather, parallel.sums, shared)

    @property
    def leads(self) -> bool:
        """It is the run: an engine is on its GPU, and it writes what all ranks hold."""
        return self.number == 0

    def rows(self, dims: Dims) -> Dims:
        """What it holds of a tensor: as many numbers where that is columns."""
        if self.in_engine and len(dims) == 1:
            return dims
        top, bottom = rows_of(dims[0], self.number % self.row_shards, self.row_shards)
        return (bottom - top, *dims[1:])

    def numbers(self, tensors: Iterable[Dims]) -> int:
        return sum(prod(self.rows(dims)) for dims in tensors)

    def held(self, shape: Shape) -> int:
        """Of the model's parameters."""
        if self.count == 1:
            return shape.total
        return sum(map(self.numbers, (*shape.each_layer, shape.root)))

    def keeps(self, shape: Shape, width: int, gpu_bytes: float) -> bool:
        """Return whether all weights stay whole from their first use in a step. `width`: bytes of a number."""
        return self.count > 1 and keeps_gathered(self.gather, shape.total * width, gpu_bytes)

    def sums_as(self, shape: Shape, gpu_bytes: float) -> str:
        """Return what becomes of parallel.sums where all weights are trained."""
        return sums_of_ranks(self.sums, 4 * shape.total, gpu_bytes if self.count > 1 else 0)

    def adds(self, shape: Shape, gpu_bytes: float) -> bool:
        """Return whether it adds up the gradients of its own micro-batches, whole, before they are sent."""
        return self.count > 1 and self.sums_as(shape, gpu_bytes) == "step"

    def gathered(self, shape: Shape, width: int, gpu_bytes: float) -> int:
        """Return how many numbers are whole while a micro-batch is computed. The root's stay so until backward ends."""
        if self.count == 1:
            return 0
        if self.keeps(shape, width, gpu_bytes):
            return shape.total
        return root_numbers(shape) + min(_TOGETHER, shape.layers) * layer_numbers(shape)


ALONE = Rank()


def layer_numbers(shape: Shape) -> int:
    """Return the number of parameters of the largest layer."""
    return max(sum(map(prod, layer)) for layer in shape.each_layer)


def root_numbers(shape: Shape) -> int:
    return sum(map(prod, shape.root))


def leaf_rounds(parallel: ParallelSpec) -> int:
    """Return how often a step sends gradients, where each rank adds up those of a share first."""
    return -(-parallel.num_shares // parallel.ranks)


def sums_kept(rounds: int) -> int:
    """Return how many sums of gradients exist at most as a round begins: the ones in the binary number of the rounds
    that are done (train/gradient_tree.py)."""
    return max((done.bit_count() for done in range(rounds)), default=0)
