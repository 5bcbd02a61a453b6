"""How long a run's sequences are, as far as they were read, and the micro-batches that come of that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.ops.byte_sizes import Shares
from tandem.ops.row_packing import first_fit, in_shares, micro_batches
from tandem.rollout.producer import task_order

_SEQUENCES = 20_000
"""At most put into micro-batches for one plan."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of what was read of a data set, or of an environment's prompts."""

    told: str
    """What was read, and what it came to."""
    groups: Sequence[RecordedGroup] = ()
    """Of recorded data, in the order in which the run reads it."""
    prompts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """An example, or a pair of answers."""

    lengths: tuple[int, ...]
    trained: tuple[int, ...]
    """Tokens of each that have a logprob."""
    shared: int = 0
    """Tokens that all of them begin with."""


@dataclass(frozen=True, slots=True)
class Micro:
    """One forward and backward pass."""

    tokens: int
    """Positions that are computed, padding included."""
    row: int
    """Positions of its longest row."""
    credited: int
    """Tokens that have a logprob."""
    masked: bool
    """A row holds several sequences, and attention is told so by a mask."""
    pairs: int = 0
    """Of positions, that attention looks at."""


@dataclass(frozen=True, slots=True)
class _PlannedItem:
    length: int
    trained: int
    sequences: tuple[int, ...]
    several: bool = False


def recorded_steps(
    groups: Sequence[RecordedGroup],
    *,
    steps: int,
    batch_size: int,
    micro_tokens: int,
    seed: int,
    shares: Shares,
    together: bool,
    packed: bool,
    multiple: int = 1,
) -> list[list[Micro]]:
    """Return the micro-batches of each step, in the order in which train/batch_packing.py would make them of these
    groups. `multiple`: parallel.shares."""
    which = task_order(len(groups), seed)
    count = max(1, min(steps, _SEQUENCES // batch_size))

    def step(number: int) -> list[Micro]:
        chosen = (groups[which(number * batch_size + place)] for place in range(batch_size))
        items = [item for group in chosen for item in _items(group, shares, micro_tokens, together=together)]
        rows: list[Sequence[_PlannedItem]] = [
            [items[index] for index in row] for row in first_fit([item.length for item in items])
        ]
        widths = [sum(item.length for item in row) for row in rows]
        parts = micro_batches(widths, micro_tokens)
        if multiple > 1:
            rows, parts = in_shares(rows, lambda item: item.length, micro_tokens, len(parts), multiple)
        return [_micro([rows[index] for index in part], packed=packed) for part in parts]

    return [step(number) for number in range(count)]


def _items(group: RecordedGroup, shares: Shares, micro_tokens: int, *, together: bool) -> Iterator[_PlannedItem]:
    """What stays together in a row: one sequence, or several."""
    tree = sum(group.lengths) - group.shared * (len(group.lengths) - 1)
    alone = [sum(group.lengths)] if together else group.lengths
    several = len(group.lengths) > 1
    if several and shares(alone, tree) and tree <= micro_tokens:
        yield _PlannedItem(tree, sum(group.trained), (tree,), several=True)
    elif together and several:
        yield _PlannedItem(sum(group.lengths), sum(group.trained), group.lengths, several=True)
    else:
        for length, trained in zip(group.lengths, group.trained, strict=True):
            yield _PlannedItem(length, trained, (length,))


def _micro(rows: Sequence[Sequence[_PlannedItem]], *, packed: bool) -> Micro:
    credited = sum(item.trained for row in rows for item in row)
    lengths = [length for row in rows for item in row for length in item.sequences]
    if packed:
        return Micro(sum(lengths), max(lengths), credited, False, sum(length**2 for length in lengths))
    width = max(sum(item.length for item in row) for row in rows)
    masked = any(len(row) > 1 or row[0].several for row in rows)
    return Micro(width * len(rows), width, credited, masked, width**2 * len(rows))
