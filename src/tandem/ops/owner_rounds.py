"""Which rank owns which tensor, and how much a rank holds for it (optim/by_owner.py). A plan asks it, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from tandem.ops.parts import rows_and_cols, rows_of

Shape = tuple[int, ...]


def num_holders(shape: Sequence[int], ranks: int) -> int:
    """Return how many ranks have rows of a parameter: the first ones."""
    rows, _ = rows_and_cols(shape)
    return -(-rows // -(-rows // ranks))


def rows_held(parameter: Shape, shape: Shape, rank: int, ranks: int) -> tuple[int, int]:
    """Return which rows a rank has of a tensor of this shape that belongs to a parameter."""
    num_rows, _ = rows_and_cols(shape)
    return rows_of(num_rows, rank, num_holders(parameter, ranks))


def rounds_of_owners(shapes: Mapping[str, Shape], ranks: int) -> list[list[str]]:
    """Return rounds: in each, the name of the tensor that each rank owns, or nothing. The costliest tensor goes first,
    to the rank with the least to do of those that have rows of it; so the tensors of a round cost about the same."""
    owned: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(shapes, key=lambda name: (-_cost(shapes[name]), name)):
        owner = min(range(num_holders(shapes[name], ranks)), key=lambda rank: (loads[rank], rank))
        owned[owner].append(name)
        loads[owner] += _cost(shapes[name])
    return [list(names) for names in zip_longest(*owned, fillvalue="")]


def most_numbers(shapes: Mapping[str, Shape], rounds: Sequence[Sequence[str]], rank: int) -> int:
    """Return how many numbers a rank has at most in a round: the owned tensor, and its rows of all."""
    found = [0]
    for names in rounds:
        owned = math.prod(shapes[names[rank]]) if names[rank] else 0
        for name in filter(None, names):
            top, bottom = rows_held(shapes[name], shapes[name], rank, len(names))
            owned += (bottom - top) * rows_and_cols(shapes[name])[1]
        found.append(owned)
    return max(found)


def _cost(shape: Shape) -> int:
    """Of products of a matrix with itself, in no unit."""
    return math.prod(shape) * min(shape[-2:], default=1)
