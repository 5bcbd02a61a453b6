"""An adapter laid together in one piece of memory: what was found out about its tensors is kept.

A trainer's are the very same tensors for each version, and so the copies are, and where each of them goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.common.flat_buffer import Flat
from tandem.bridge.common.manifest import Places
from tandem.bridge.common.served_tensors import Form, check_numbers, forms, shaped
from tandem.ops.batched_copy import same
from tandem.ops.phase_timer import Phases
from tandem.types import Fingerprints, Weights

Named = list[tuple[str, Tensor]]


class PackedAdapter:
    def __init__(self, named: Named, replies: Sequence[Mapping[str, Any]], places: Places, head: bytes) -> None:
        self._named, self._replies = named, list(replies)
        device = named[0][1].device if named else torch.device("cpu")
        self.flat = Flat(places, max(places.size_bytes, len(head)), device, alone=True)
        if head:
            self.flat.raw[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.filling = self.flat.filling(named)

    def is_of(self, named: Named, replies: Sequence[Mapping[str, Any]]) -> bool:
        """The very same tensors, for engines that said the same of themselves."""
        ours, theirs = ([tensor for _, tensor in each] for each in (self._named, named))
        names = [name for name, _ in self._named] == [name for name, _ in named]
        return names and same(ours, theirs) and same(self._replies, replies)


class Laying:
    """One version after the other, in the same place while they are of one form."""

    def __init__(self, mode: str, laid_out: Callable[[Mapping[str, Form]], tuple[Places, bytes]]) -> None:
        """`laid_out`: where tensors of these forms go, and what lies before the first of them."""
        self._mode, self._laid_out = mode, laid_out
        self._packed: PackedAdapter | None = None

    def lay(self, weights: Weights, replies: Sequence[Mapping[str, Any]], phases: Phases) -> tuple[Flat, Fingerprints]:
        """SyncError if it cannot be served, or holds what is no number."""
        named = list(weights.tensors())
        packed = self._packed
        if packed is None or not packed.is_of(named, replies):
            into = _forms_of(weights, named, replies, self._mode)
            self._packed = packed = PackedAdapter(named, replies, *self._laid_out(into))
        packed.filling.run()
        phases.end("gather")
        fingerprints, odd = packed.flat.looked_at()
        phases.end("hash")
        check_numbers(odd, weights, packed.flat.places.tensors, self._mode)
        return packed.flat, fingerprints


def _forms_of(weights: Weights, named: Named, replies: Sequence[Mapping[str, Any]], mode: str) -> dict[str, Form]:
    """SyncError unless each can be served in the form that is asked for. `named`: what `weights` yielded; tensors may
    be made anew each time that they are gone through."""
    again = replace(weights, tensors=lambda: iter(named))
    into = forms(again, replies, mode)
    for _ in shaped(again, into, mode):
        """Looks at each."""
    return into
