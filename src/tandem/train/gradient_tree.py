"""Sums of gradients in an order that depends on the micro-batches alone, and norms that depend on no rank.

A step is one binary tree of leaves: (0 + 1) + (2 + 3), then (that) + (4 + 5), and so on. A leaf is one micro-batch, or
with `parallel.sums = "step"` all of one share, added up one after the other. With N ranks, round k computes the leaves
kN to kN + N - 1, one on each rank. Their sum over ranks is a subtree if N is a power of two, so 1, 2, 4 and 8 ranks add
the same numbers in the same order. A leaf that is absent (fewer leaves than ranks in the last round) is left out:
adding zero would turn -0.0 into 0.0. With `parallel.sums = "running"` rounds are no tree: each is added to the sum of
those before it, which takes one sum instead of log2(rounds).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tandem.ops.leaf_sum import Gradients, LeafSum
from tandem.ops.named_tensors import in_blocks
from tandem.ops.parts import numbers_a_norm

_STEPS = 2.0**38


class Rounds(Protocol):
    """Where the gradients of one round come from: float32, summed over ranks, of the rows that this rank holds."""

    running: bool  # a round ends with the sum of the step until then

    def begin(self, present: Sequence[bool], *, first: bool) -> None: ...  # which ranks have a leaf; first of a step
    def before(self, *, last: bool) -> None: ...  # before the forward pass of each of its micro-batches
    def after(self, *, counts: bool) -> None: ...  # after its backward pass; without `counts`: forget what it gave
    def end(self, *, last: bool) -> Gradients: ...
    def settle(self) -> None: ...  # after the last round: the weights change now


class OneRank:
    """Rounds of a trainer that is one process: every gradient as backward left it."""

    running = False

    def __init__(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        self._leaf = LeafSum(parameters)

    def begin(self, present: Sequence[bool], *, first: bool) -> None:
        self._leaf.forget()

    def before(self, *, last: bool) -> None:
        """Nothing is sent."""

    def after(self, *, counts: bool) -> None:
        self._leaf.take()

    def end(self, *, last: bool) -> Gradients:
        return self._leaf.sums()

    def settle(self) -> None:
        """Nothing was gathered."""


class TreeSum:
    """A binary counter: level k holds a sum of 2^k rounds that follow each other, so log2(rounds) sums exist."""

    def __init__(self) -> None:
        self._levels: list[Gradients | None] = []

    def add(self, gradients: Gradients) -> None:
        """Takes the tensors: they are added to in place."""
        level = 0
        while level < len(self._levels) and (earlier := self._levels[level]) is not None:
            gradients = _sum(earlier, gradients)
            self._levels[level] = None
            level += 1
        if level == len(self._levels):
            self._levels.append(None)
        self._levels[level] = gradients

    def take(self) -> Gradients:
        """The sum of all; empty if there were none."""
        total: Gradients | None = None
        for level in self._levels:
            if level is not None:
                total = level if total is None else _sum(level, total)
        self._levels = []
        return total or {}


def _sum(earlier: Gradients, later: Gradients) -> Gradients:
    for name in [*later]:
        gradient = later.pop(name)
        earlier[name] = earlier[name].add_(gradient) if name in earlier else gradient
    return earlier


def tree(leaves: Sequence[Tensor]) -> Tensor:
    """The sum of leaves that follow each other. The first ones are overwritten."""
    level = list(leaves)
    while len(level) > 1:
        level = [level[i].add_(level[i + 1]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


# --- the norm: squares of rows, added up as integers, so that the order of rows and ranks makes no difference


@torch.no_grad()
def row_squares(gradients: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]] | None = None) -> Tensor:
    """Return the square of the norm of each row, or block of one, in double precision: each is whole on one rank.
    `shapes`: of whole tensors, where these are parts of them."""
    norms = [
        torch.linalg.vector_norm(
            in_blocks(each, numbers_a_norm(name, (shapes or {}).get(name, each.shape))), dim=1, dtype=torch.float32
        )
        for name, each in gradients.items()
    ]
    return torch.cat(norms).double().square() if norms else torch.zeros(0, dtype=torch.float64)


def largest_of(squares: Tensor) -> float:
    """Return the largest square; 0 if there is none, and not finite if any is not."""
    return squares.max().item() if squares.numel() else 0.0


def sum_in_steps(squares: Tensor, largest: float) -> int:
    """Return the sum of the squares as a whole number of steps, 2^38 of which are `largest`, the largest of all ranks.
    The sum of 2^24 squares fits in 64 bits."""
    if not 0.0 < largest < math.inf or not squares.numel():
        return 0
    return int((squares * (_STEPS / largest)).round().to(torch.int64).sum().item())


def norm_of(steps: int, largest: float) -> float:
    """Return the norm of a sum in steps; not finite if a square is not."""
    return math.sqrt(steps * (largest / _STEPS)) if math.isfinite(largest) else math.nan
