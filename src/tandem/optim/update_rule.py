"""Define update rules: a rule changes fp32 values in place, given fp32 gradients.

`master_weights` stores the weights (fp32, or bf16 with or without the bits that it lacks); `optimizer` clips gradients
and sets learning rates. So each rule is one short file and works with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(slots=True)
class Slot:
    """One parameter, or some of its rows, during an update."""

    name: str
    value: Tensor
    """fp32; the rule changes it in place."""
    grad: Tensor
    """fp32, clipped, finite. The rule may overwrite it."""
    state: dict[str, Tensor]
    """The tensors that `init` made; the rule changes them in place."""
    step: int
    """Number of this update of the parameter, from 1 on."""
    lr: float
    decay: float
    """Decoupled weight decay: value -= lr * decay * value."""


@dataclass(frozen=True, slots=True)
class Whole:
    """One parameter in place, for a rule that reads, updates, writes and counts in one kernel."""

    live: Tensor
    low: Tensor | None
    """The 16 bits that a bf16 weight lacks; None beside a float32 one."""
    grad: Tensor
    """bf16 or fp32, finite, to be multiplied by `scale`."""
    scale: float
    state: dict[str, Tensor]
    step: int
    lr: float
    decay: float


class UpdateRule(Protocol):
    by_rows: bool
    """Whether rows of a parameter (along dim 0) may be updated separately; every state tensor has the same rows."""

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]: ...
    def update(self, slots: Sequence[Slot]) -> None: ...
    def why_not_whole(self, live: Tensor) -> str:
        """Return why `update_whole` cannot take this parameter; empty if it can."""
        ...

    def update_whole(self, wholes: Sequence[Whole]) -> Tensor:
        """Update the parameters. Return the six sums of optim/optimizer.py, on the device."""
        ...


class RowCut(NamedTuple):
    """Where this rank's rows of a tensor begin, and the shape of the whole."""

    row_start: int
    full_shape: tuple[int, ...]


class RoundRule(UpdateRule, Protocol):
    """A rule that ranks with some rows each apply together, in rounds over some parameters each."""

    @property
    def rounds(self) -> Sequence[Sequence[str]]:
        """All of the rule's parameters by round, also those without a row on this rank. A name may be empty."""
        ...

    def update_round(self, number: int, slots: Sequence[Slot]) -> None:
        """Update a round's parameters; all ranks call it. `slots`: this rank's rows of those with a gradient."""
        ...

    def cut(self, name: str) -> Mapping[str, RowCut]:
        """Return where this rank's rows of a parameter's state are, by key."""
        ...

    def most_numbers(self) -> int:
        """Return the most numbers that this rank holds in a round."""
        ...


class ByParts:
    """A rule of several torch operations, without a kernel of its own."""

    def why_not_whole(self, live: Tensor) -> str:
        return f"{type(self).__name__} has no kernel of its own"

    def update_whole(self, wholes: Sequence[Whole]) -> Tensor:
        raise NotImplementedError(self.why_not_whole(wholes[0].live))
