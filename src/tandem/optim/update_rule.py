"""What an optimizer is here: a rule that changes fp32 values in place, given fp32 gradients.

Where the weights really live (fp32, or bf16 with or without the bits that it lacks) is `master`'s business;
clipping and learning rates are `optimizer`'s. So each rule is one short file and works with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(slots=True)
class Slot:
    """One parameter, or some rows of it, on its way through an update."""

    name: str
    value: Tensor
    """fp32; the rule changes it in place."""
    grad: Tensor
    """fp32, clipped, finite. The rule may overwrite it."""
    state: dict[str, Tensor]
    """What `init` made, changed in place."""
    step: int
    """Updates of this parameter so far, this one included: 1 at the first."""
    lr: float
    decay: float
    """Decoupled weight decay: value -= lr * decay * value."""


@dataclass(frozen=True, slots=True)
class Whole:
    """One parameter where it lies, for a rule that does reading, updating, writing and counting in one go."""

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
    """Rows of a parameter (along dim 0) may be updated apart from each other; every state tensor has the same rows."""

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]: ...
    def update(self, slots: Sequence[Slot]) -> None: ...
    def why_not_whole(self, live: Tensor) -> str:
        """Why `update_whole` is not for this parameter; empty if it is."""
        ...

    def update_whole(self, wholes: Sequence[Whole]) -> Tensor:
        """What became of it, as optim/optimizer.py counts it: six numbers, on the device."""
        ...


class Cut(NamedTuple):
    """Where this rank's rows of a tensor begin, and the shape of the whole."""

    row_start: int
    full_shape: tuple[int, ...]


class RoundRule(UpdateRule, Protocol):
    """A rule that ranks, which have some rows each, apply together: round after round, each of some parameters."""

    @property
    def rounds(self) -> Sequence[Sequence[str]]:
        """Names of all parameters of the rule, also of those of which this rank has no row. A name may be empty."""
        ...

    def update_round(self, number: int, slots: Sequence[Slot]) -> None:
        """Called by all ranks in every round. `slots`: this rank's rows of those that have a gradient."""
        ...

    def cut(self, name: str) -> Mapping[str, Cut]:
        """How the state of a parameter is cut into rows, by key."""
        ...

    def most_numbers(self) -> int:
        """How many numbers a round has at most on this rank."""
        ...


class ByParts:
    """A rule of torch's operations, one after the other."""

    def why_not_whole(self, live: Tensor) -> str:
        return f"{type(self).__name__} has no kernel of its own"

    def update_whole(self, wholes: Sequence[Whole]) -> Tensor:
        raise NotImplementedError(self.why_not_whole(wholes[0].live))
