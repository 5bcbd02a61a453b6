"""Rectangles of named tensors: which rank holds them, which receiver serves them, and whether they are all there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from tandem.bridge.common.manifest import dtype_named
from tandem.bridge.common.packer import Form
from tandem.errors import SyncError
from tandem.ops.parts import Box, box_of_rank, rows_and_cols
from tandem.types import Part


class TensorPlace(NamedTuple):
    """A rectangle of a named tensor, which a rank holds or a receiver serves."""

    name: str
    box: Box

    def __str__(self) -> str:
        top, bottom, left, right = self.box
        return f"'{self.name}', rows {top} to {bottom} and columns {left} to {right}"


class TensorSize(NamedTuple):
    shape: tuple[int, ...]
    itemsize: int

    @property
    def whole(self) -> Box:
        rows, cols = rows_and_cols(self.shape)
        return Box(0, rows, 0, cols)


Sizes = Mapping[str, TensorSize]

Places = Sequence[TensorPlace]


def sizes_of(forms: Mapping[str, Form]) -> dict[str, TensorSize]:
    return {name: TensorSize(tuple(form.shape), dtype_named(form.dtype).itemsize) for name, form in forms.items()}


def whole_places(forms: Mapping[str, Form]) -> list[TensorPlace]:
    return [TensorPlace(name, size.whole) for name, size in sizes_of(forms).items()]


def place_of(part: Part) -> TensorPlace:
    rows, cols = rows_and_cols(part.tensor.shape)
    return TensorPlace(part.name, Box(part.row_start, part.row_start + rows, part.col_start, part.col_start + cols))


def distinct(served: Sequence[Places]) -> list[TensorPlace]:
    return list(dict.fromkeys(place for places in served for place in places))


def to_numbers(places: Places, forms: Mapping[str, Form]) -> list[int]:
    """Return five numbers for each place: the position of its name, and its box."""
    position = {name: number for number, name in enumerate(forms)}
    return [number for name, box in places for number in (position[name], *box)]


def from_numbers(numbers: Sequence[int], forms: Mapping[str, Form]) -> list[TensorPlace]:
    names = list(forms)
    if any(type(number) is not int or number < 0 for number in numbers) or len(numbers) % 5:
        raise ValueError("a box is five numbers, none below 0")
    fives = (numbers[at : at + 5] for at in range(0, len(numbers), 5))
    return [TensorPlace(names[name], Box(*box)) for name, *box in fives]


def holders(held: Sequence[Places]) -> dict[TensorPlace, list[int]]:
    """Return the ranks that hold each box."""
    found: defaultdict[TensorPlace, list[int]] = defaultdict(list)
    for rank, places in enumerate(held):
        for place in places:
            found[place].append(rank)
    return dict(found)


def overlaps(some: Places, others: Places) -> Iterator[tuple[int, int, TensorPlace]]:
    """Yield each common rectangle with the positions in both lists, ordered by them."""
    theirs = by_name((place, number) for number, place in enumerate(others))
    for number, (name, box) in enumerate(some):
        for other, position in theirs[name]:
            if (both := box.overlap(other)) is not None:
                yield number, position, TensorPlace(name, both)


# --- checks


def check_held(sizes: Sizes, held: Sequence[Places], num_shards: int) -> None:
    """Raise SyncError unless the ranks together hold every element, and none holds what is another's. `num_shards`:
    each tensor is cut into so many runs of rows; a rank holds its run or the whole tensor."""
    for rank, places in enumerate(held):
        who = f"rank {rank}"
        _check_names(sizes, places, who)
        for place in places:
            size = sizes[place.name]
            own = box_of_rank(size.shape, rank % num_shards, num_shards)
            if place.box not in (own, size.whole):
                raise SyncError(f"{who} says that it holds {place}; its rows are {own.top} to {own.bottom}")
    _check_tiled(sizes, [list(places) for places in held], "the ranks of the trainer")


def check_served(sizes: Sizes, engines: Mapping[str, Sequence[Places]]) -> None:
    """Raise SyncError unless each engine's receivers together serve every element. `engines`: by name, the places of
    each of its receivers."""
    for name, receivers in engines.items():
        for number, places in enumerate(receivers):
            _check_names(sizes, places, f"worker {number} of engine {name}")
        _check_tiled(sizes, receivers, f"the workers of engine {name}")


def _check_names(sizes: Sizes, places: Places, who: str) -> None:
    seen = set[TensorPlace]()
    for place in places:
        if place.name not in sizes:
            raise SyncError(f"{who} names '{place.name}', which is not served")
        if place in seen:
            raise SyncError(f"{who} names {place} twice")
        seen.add(place)
        top, bottom, left, right = place.box
        _, rows, _, cols = sizes[place.name].whole
        if not (0 <= top <= bottom <= rows and 0 <= left <= right <= cols):
            shape = list(sizes[place.name].shape)
            raise SyncError(f"{who} names {place}, and the tensor is of shape {shape}")


def _check_tiled(sizes: Sizes, holders: Sequence[Places], who: str) -> None:
    """Raise SyncError unless the distinct boxes cover every tensor, and no two of them overlap."""
    boxes = by_name((place, 0) for place in dict.fromkeys(place for places in holders for place in places))
    for name, size in sizes.items():
        found = [box for box, _ in boxes[name]]
        for number, box in enumerate(found):
            for other in found[:number]:
                if (both := box.overlap(other)) is not None:
                    raise SyncError(f"{who} name {TensorPlace(name, both)} more than once, as parts of different boxes")
        covered, whole = sum(box.num_elements for box in found), size.whole.num_elements
        if covered != whole:
            raise SyncError(f"{who} name {covered} of the {whole} elements of '{name}'; the others are left out")


def by_name(
    places: Iterator[tuple[TensorPlace, int]] | Sequence[tuple[TensorPlace, int]],
) -> defaultdict[str, list[tuple[Box, int]]]:
    found: defaultdict[str, list[tuple[Box, int]]] = defaultdict(list)
    for (name, box), number in places:
        found[name].append((box, number))
    return found


def matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(rows_and_cols(tensor.shape))


def cut(values: Tensor, box: Box, inner: Box) -> Tensor:
    """Return a rectangle of a matrix that is `box` of its tensor."""
    return values[inner.top - box.top : inner.bottom - box.top, inner.left - box.left : inner.right - box.left]
