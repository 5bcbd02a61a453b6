"""Many copies as few launches: of small tensors, a launch each takes longer than the bytes.

On a CPU it is one call where there were hundreds: each lets go of the interpreter, and may wait to get it back. On a
GPU, repeating the same copies replays a graph.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.ops.cuda_graph import Replay

_foreach_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_SMALL_BYTES = 2**20  # a larger one is sooner copied by itself, at the memory's own speed


class Copying:
    """The same copies, again and again: into the first of each pair the second's values. No two write to one place."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        small: defaultdict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        self._large = list[tuple[Tensor, Tensor]]()
        for into, source in pairs:
            if into.nbytes <= _SMALL_BYTES:
                targets, sources = small[into.device, source.device, into.dtype, source.dtype]
                targets.append(into)
                sources.append(source)
            else:
                self._large.append((into, source))
        self._small = list(small.values())
        devices = {tensor.device for pair in self._large for tensor in pair}
        devices |= {tensors[0].device for each in self._small for tensors in each}
        self._replay = Replay(self._copy, devices, "copies")

    def run(self) -> None:
        self._replay.run()

    @torch.no_grad()
    def _copy(self) -> None:
        for into, source in self._large:
            into.copy_(source)
        for targets, sources in self._small:
            _foreach_copy(targets, sources)


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """The very same objects, and some: what was made of them fits them still. They must be held, so that none can be
    another one by now."""
    return len(some) == len(others) > 0 and all(map(operator.is_, some, others))


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Once."""
    Copying(pairs).run()
