"""An adapter laid together in one piece of memory: what was found out about its tensors is kept.

A trainer's are the very same tensors for each version, and so the copies are, and where each of them goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.flat import Flat
from tandem.bridge.outgoing import Form, forms, shaped
from tandem.bridge.wire import Places
from tandem.ops.copying import same
from tandem.types import Weights

Named = list[tuple[str, Tensor]]


class Packed:
    def __init__(
        self, named: Named, replies: Sequence[Mapping[str, Any]], places: Places, ahead_bytes: int = 0
    ) -> None:
        """`ahead_bytes`: what lies before the first of them."""
        self._named, self._replies = named, list(replies)
        device = named[0][1].device if named else torch.device("cpu")
        self.flat = Flat(places, max(places.size_bytes, ahead_bytes), device)
        self.filling = self.flat.filling(named)

    def is_of(self, named: Named, replies: Sequence[Mapping[str, Any]]) -> bool:
        """The very same tensors, for engines that said the same of themselves."""
        ours, theirs = ([tensor for _, tensor in each] for each in (self._named, named))
        names = [name for name, _ in self._named] == [name for name, _ in named]
        return names and same(ours, theirs) and same(self._replies, replies)


def forms_of(weights: Weights, named: Named, replies: Sequence[Mapping[str, Any]], mode: str) -> dict[str, Form]:
    """SyncError unless each can be served in the form that is asked for. `named`: what `weights` yielded; tensors may
    be made anew each time that they are gone through."""
    again = replace(weights, tensors=lambda: iter(named))
    into = forms(again, replies, mode)
    for _ in shaped(again, into, mode):
        """Looks at each."""
    return into
