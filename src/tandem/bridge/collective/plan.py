"""Which rank sends which rectangle of which tensor to which receiver, in which order.

The plan follows from what each rank holds and what each receiver serves. It is computed on every process alone, and
from the same boxes it is the same everywhere. Several ranks may hold the same box, and several receivers may serve it:
one of the ranks sends it, and every receiver gets it.

Tensors travel in rounds. In one round each rank sends at most one bucket to each receiver, and no process sends or
receives more than `bucket_bytes`. A tensor that is larger than that is cut, on all ranks alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.bridge.common.places import Places, Sizes, TensorPlace, by_name, holders
from tandem.ops.parts import Box


class Cut(NamedTuple):
    """A rectangle that travels from one rank to one receiver."""

    place: TensorPlace
    offset: int
    """Its first byte in the bucket."""


class Bucket(NamedTuple):
    """What goes to one peer, or comes from it, in one round."""

    peer: int
    size_bytes: int
    cuts: Sequence[Cut]


@dataclass(frozen=True, slots=True)
class Round:
    buckets: Mapping[tuple[int, int], Sequence[Cut]]
    """By rank and receiver."""
    sizes: Mapping[tuple[int, int], int]
    """Bytes of each bucket."""


@dataclass(frozen=True, slots=True)
class SendPlan:
    rounds: Sequence[Round]

    def rounds_of_rank(self, rank: int) -> list[list[Bucket]]:
        """Return what that rank sends in each round: to which receivers."""
        return [
            [Bucket(pair[1], each.sizes[pair], cuts) for pair, cuts in each.buckets.items() if pair[0] == rank]
            for each in self.rounds
        ]

    def rounds_of_receiver(self, receiver: int) -> list[list[Bucket]]:
        """Return what that receiver gets in each round: from which ranks."""
        return [
            [Bucket(pair[0], each.sizes[pair], cuts) for pair, cuts in each.buckets.items() if pair[1] == receiver]
            for each in self.rounds
        ]

    @property
    def total_bytes(self) -> int:
        return sum(size for each in self.rounds for size in each.sizes.values())


def make_plan(sizes: Sizes, held: Sequence[Places], served: Sequence[Places], bucket_bytes: int) -> SendPlan:
    """Return the plan. Tensors travel in the order of `sizes`. `held`: of each rank, checked by `check_held`. `served`:
    of each receiver, checked by `check_served`."""
    owners = by_name(chosen_owners(sizes, held))
    wanted = by_name((place, receiver) for receiver, places in enumerate(served) for place in dict.fromkeys(places))
    rounds = _Rounds(bucket_bytes)
    for name, size in sizes.items():
        cuts = [
            (rank, receiver, both)
            for held_box, rank in owners[name]
            for served_box, receiver in wanted[name]
            if (both := held_box.overlap(served_box)) is not None
        ]
        rounds.add(name, cuts, size.itemsize)
    return SendPlan(rounds.close())


def chosen_owners(sizes: Sizes, held: Sequence[Places]) -> list[tuple[TensorPlace, int]]:
    """Return each box with the rank that sends it. Of several ranks that hold it, take the one with the least to send
    so far."""
    bytes_of = [0] * len(held)
    found: list[tuple[TensorPlace, int]] = []
    for place, ranks in holders(held).items():
        rank = min(ranks, key=lambda each: (bytes_of[each], each))
        bytes_of[rank] += place.box.num_elements * sizes[place.name].itemsize
        found.append((place, rank))
    return found


# --- rounds


class _Rounds:
    """Collects cuts into rounds. A cut that is larger than a bucket allows is split, and so are the tensor's others."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._done: list[Round] = []
        self._buckets: defaultdict[tuple[int, int], list[Cut]] = defaultdict(list)
        self._sizes: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._loads: defaultdict[tuple[str, int], int] = defaultdict(int)
        """Bytes that each process sends or receives in this round."""

    def add(self, name: str, cuts: Sequence[tuple[int, int, Box]], itemsize: int) -> None:
        """Add all cuts of one tensor: rank, receiver and box of each."""
        most = max(
            _loads((rank, receiver, box.num_elements * itemsize) for rank, receiver, box in cuts).values(), default=0
        )
        pieces = max(1, -(-most // self._bucket_bytes))
        for number in range(pieces):
            split = [(rank, receiver, _piece(box, number, pieces)) for rank, receiver, box in cuts]
            self._add(name, [each for each in split if each[2].num_elements], itemsize)

    def _add(self, name: str, cuts: Sequence[tuple[int, int, Box]], itemsize: int) -> None:
        more = _loads((rank, receiver, box.num_elements * itemsize) for rank, receiver, box in cuts)
        if any(self._loads[who] + load > self._bucket_bytes for who, load in more.items()):
            self._close_round()
        for who, load in more.items():
            self._loads[who] += load
        for rank, receiver, box in cuts:
            pair = rank, receiver
            offset = -(-self._sizes[pair] // itemsize) * itemsize
            self._buckets[pair].append(Cut(TensorPlace(name, box), offset))
            self._sizes[pair] = offset + box.num_elements * itemsize

    def close(self) -> list[Round]:
        self._close_round()
        return self._done

    def _close_round(self) -> None:
        if self._buckets:
            self._done.append(Round(dict(self._buckets), dict(self._sizes)))
        self._buckets, self._sizes = defaultdict(list), defaultdict(int)
        self._loads.clear()


def _loads(cuts: Iterator[tuple[int, int, int]]) -> dict[tuple[str, int], int]:
    """Return the bytes of each process. `cuts`: rank, receiver, bytes."""
    loads: defaultdict[tuple[str, int], int] = defaultdict(int)
    for rank, receiver, size in cuts:
        loads["sender", rank] += size
        loads["receiver", receiver] += size
    return dict(loads)


def _piece(box: Box, number: int, pieces: int) -> Box:
    """Return one of `pieces` nearly equal pieces of a box, cut along its longer side if it has too few rows."""
    rows, cols = box.bottom - box.top, box.right - box.left
    if rows >= min(pieces, cols):
        return Box(box.top + rows * number // pieces, box.top + rows * (number + 1) // pieces, box.left, box.right)
    return Box(box.top, box.bottom, box.left + cols * number // pieces, box.left + cols * (number + 1) // pieces)
