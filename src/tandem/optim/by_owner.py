"""Apply rules that need whole tensors when each rank has only some rows: one rank, the owner, updates each tensor.

    every rank                                  the tensor's owner
    sends its rows                           -> joins them, in the order of ranks
                                                computes what one rank alone would compute
    receives its rows                        <- sends each rank its rows

So 1, 2 and 4 ranks give the same bytes. Before the first step, tensors are assigned to ranks by cost. They are
exchanged in rounds; in a round each rank owns at most one tensor, so it holds one whole tensor at a time. Every rank
takes part in every round, even if it has no row of the round's tensors; otherwise the exchange would hang.

State is cut by rows, too, over the ranks that have rows of its parameter; a tensor with fewer rows than ranks (a scalar
has one) is on the first ranks only. So a checkpoint has whole tensors, written by rows, and another number of ranks can
resume from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.ops.owner_rounds import Shape, most_numbers, rounds_of_owners, rows_held
from tandem.ops.parts import rows_and_cols
from tandem.optim.update_rule import ByParts, RowCut, Slot, UpdateRule


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks that share the rows."""

    rank: int
    ranks: int
    device: torch.device
    group: Any
    """Their torch process group."""
    tick: Callable[[], None]
    """Reports progress."""


class Owners:
    """Which rank owns which tensor, and the two exchanges of a round."""

    def __init__(self, ranks: RankGroup, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        """`shapes`: of all tensors, also those without a row on this rank. `dtype`: of what is exchanged."""
        self._ranks, self._dtype = ranks, dtype
        self.rank = ranks.rank
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.rounds = rounds_of_owners(self.shapes, ranks.ranks)

    def rows(self, name: str, shape: Shape) -> tuple[int, int]:
        """Return which rows this rank has of a tensor of this shape that belongs to a parameter."""
        return self._rows(name, shape, self.rank)

    def gather(self, number: int, rows: Mapping[str, Tensor], shape: Shape | None) -> Tensor | None:
        """Send `rows` to the owners of this round's tensors, and return the whole tensor that this rank owns. All ranks
        call it. `shape`: of the owned tensor; None if this rank owns none, or none with a gradient."""
        names = self.rounds[number]
        sent = [rows[name].reshape(-1) if name in rows else self._empty(0) for name in names]
        counts = self._counts(names[self.rank], shape)
        received = self._empty(sum(counts))
        self._exchange(received, torch.cat(sent), counts, [each.numel() for each in sent])
        return None if shape is None else received.view(shape)

    def scatter(self, number: int, whole: Tensor | None, into: Mapping[str, Tensor]) -> None:
        """Send the rows of `whole` to the ranks that have them, and fill `into` with this rank's rows from the owners
        of this round's tensors. All ranks call it."""
        names = self.rounds[number]
        counts = [into[name].numel() if name in into else 0 for name in names]
        received = self._empty(sum(counts))
        sent = self._empty(0) if whole is None else whole.reshape(-1)
        shape = None if whole is None else tuple(whole.shape)
        self._exchange(received, sent, counts, self._counts(names[self.rank], shape))
        for name, piece in zip(names, received.split(counts), strict=True):
            if name in into:
                into[name].copy_(piece.view(into[name].shape))

    def most_numbers(self) -> int:
        """Return the most numbers that this rank holds in a round: its owned tensor, and its rows of all."""
        return most_numbers(self.shapes, self.rounds, self._ranks.rank)

    def _exchange(self, received: Tensor, sent: Tensor, counts: list[int], sent_counts: list[int]) -> None:
        self._ranks.tick()
        dist.all_to_all_single(received, sent, counts, sent_counts, group=self._ranks.group)

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=self._dtype, device=self._ranks.device)

    def _counts(self, name: str, shape: Shape | None) -> list[int]:
        """Return how many numbers of this tensor each rank has."""
        if shape is None:
            return [0] * self._ranks.ranks
        _, cols = rows_and_cols(shape)
        cuts = (self._rows(name, shape, rank) for rank in range(self._ranks.ranks))
        return [(bottom - top) * cols for top, bottom in cuts]

    def _rows(self, name: str, shape: Shape, rank: int) -> tuple[int, int]:
        return rows_held(self.shapes[name], shape, rank, self._ranks.ranks)


class ByOwner(ByParts):
    """Applies any rule. Values, gradients and state are exchanged in float32."""

    by_rows = False

    def __init__(self, rule: UpdateRule, owners: Owners) -> None:
        self._rule, self._owners, self.rounds = rule, owners, owners.rounds
        self._state = {name: _state_shapes(rule, name, shape) for name, shape in owners.shapes.items()}

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for key, shape in self._state[name].items():
            top, bottom = self._owners.rows(name, shape)
            if bottom > top:
                found[key] = torch.zeros((bottom - top, *shape[1:]) if shape else (), device=like.device)
        return found

    def cut(self, name: str) -> dict[str, RowCut]:
        return {key: RowCut(self._owners.rows(name, shape)[0], shape) for key, shape in self._state[name].items()}

    def most_numbers(self) -> int:
        return self._owners.most_numbers()

    def update(self, slots: Sequence[Slot]) -> None:
        raise NotImplementedError("all ranks update a round together: update_round")

    def update_round(self, number: int, slots: Sequence[Slot]) -> None:
        here = {slot.name: {"value": slot.value, "grad": slot.grad, **slot.state} for slot in slots}
        owned = self.rounds[number][self._owners.rank]
        mine = next((slot for slot in slots if slot.name == owned), None)
        shapes = {} if mine is None else {**self._both(owned), **self._state[owned]}
        # Sorted: every rank must exchange the keys in the same order.
        keys = sorted({key for name in self.rounds[number] if name for key in (*self._both(name), *self._state[name])})
        rows = {key: {name: each[key] for name, each in here.items() if key in each} for key in keys}
        whole = {key: self._owners.gather(number, rows[key], shapes.get(key)) for key in keys}
        if mine is not None:
            tensors = {key: tensor for key, tensor in whole.items() if tensor is not None}
            state = {key: tensors[key] for key in self._state[owned]}
            self._rule.update([replace(mine, value=tensors["value"], grad=tensors["grad"], state=state)])
        for key in keys:
            if key != "grad":
                self._owners.scatter(number, whole[key], rows[key])

    def _both(self, name: str) -> dict[str, Shape]:
        return {"value": self._owners.shapes[name], "grad": self._owners.shapes[name]}


def _state_shapes(rule: UpdateRule, name: str, shape: Shape) -> dict[str, Shape]:
    state = rule.init(name, torch.empty(shape, device="meta"))
    assert all(each.dtype == torch.float32 for each in state.values()), "state travels in float32"
    return {key: tuple(each.shape) for key, each in state.items()}
