"""A version in one piece of memory that stays: where each tensor lies, and how it is digested, is found out once.

An adapter has hundreds of small tensors. To go through them, make views and look each of them up takes several times
as long as their bytes take to travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tandem.bridge.common.manifest import Places
from tandem.ops import digest
from tandem.ops.batched_copy import Copying
from tandem.types import Fingerprints


class Flat:
    def __init__(self, places: Places, size_bytes: int, device: torch.device, *, alone: bool = False) -> None:
        """`size_bytes`: what is there in all, as whoever sends it has announced it. `alone`: as ops/cuda_graph.py has
        it;
        an engine samples while a version arrives."""
        self.places = places
        self.raw = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.tensors = {name: entry.view(self.raw) for name, entry in places.tensors.items()}
        self._standing = digest.RepeatedDigest(
            ((name, tensor, 0, 0) for name, tensor in self.tensors.items()), checked=True, alone=alone
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())

    def filling(self, tensors: Iterable[tuple[str, Tensor]]) -> Copying:
        """Out of these. Cast on the way."""
        return Copying((self.tensors[name], tensor) for name, tensor in tensors)

    def fingerprints(self) -> Fingerprints:
        """Of what is there now."""
        return self._named(self._standing.take())

    def looked_at(self) -> tuple[Fingerprints, list[str]]:
        """And the names of those that hold what is no number."""
        numbers, odd = self._standing.look()
        return self._named(numbers), odd

    def _named(self, numbers: list[int]) -> Fingerprints:
        return dict(zip(self.tensors, digest.texts(numbers), strict=True))
