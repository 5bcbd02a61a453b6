"""What each rank of the trainer holds of one version, with the digests; and the proof that all ranks hold one version.

No rank holds a whole tensor. Digests of rectangles that do not overlap add up to the digest of the whole, so rank 0
needs only numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.bridge.common.manifest import dtype_named
from tandem.bridge.common.packer import Form
from tandem.bridge.common.places import (
    Places,
    Sizes,
    TensorPlace,
    cut,
    from_numbers,
    holders,
    matrix,
    place_of,
    to_numbers,
)
from tandem.errors import RanksDiverged, SyncError
from tandem.ops import digest
from tandem.ops.named_tensors import Finite
from tandem.ops.phase_timer import Phases
from tandem.types import Fingerprints, Part, Weights

_HELD_BYTES = {"cuda": 2**29}
"""Bytes of tensors that may be kept until their digests are taken together."""


class Held(NamedTuple):
    """What a rank says that it holds of one version."""

    places: Places
    digests: Sequence[int]
    """Of each place."""
    cuts: Sequence[int]
    """The digest of each rectangle that one of its places has in common with a place that is served, in the order of
    `plan.overlaps`."""

    def to_json(self, forms: Mapping[str, Form]) -> dict[str, Any]:
        joined = ["".join(digest.texts(numbers)) for numbers in (self.digests, self.cuts)]
        return {"places": to_numbers(self.places, forms), "digests": joined[0], "cuts": joined[1]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], forms: Mapping[str, Form]) -> Held:
        digests, cuts = ([int(each, 16) for each in digest.parted(content[key])] for key in ("digests", "cuts"))
        return cls(from_numbers(content["places"], forms), digests, cuts)


class HeldWeights:
    """A version, as far as this rank holds it."""

    def __init__(self, weights: Weights, into: Mapping[str, Form], mode: str) -> None:
        self._weights, self._into = weights, into
        self._what = f"{mode}: version {weights.version}"

    @torch.no_grad()
    def digest(self, served: Places, phases: Phases) -> Held:
        """Return the boxes that this rank holds, and the digests. SyncError if a tensor cannot be served in the form
        that receivers have told. `served`: the distinct places of all receivers."""
        wanted: defaultdict[str, list[TensorPlace]] = defaultdict(list)
        for place in served:
            wanted[place.name].append(place)
        places: list[TensorPlace] = []
        cuts: list[TensorPlace] = []
        numbers: dict[TensorPlace, int] = {}
        pending: list[tuple[TensorPlace, Tensor]] = []
        pending_bytes = 0
        finite = Finite()

        def take() -> None:
            phases.end("gather")
            found = digest.pieces((place.name, tensor, place.box.top, place.box.left) for place, tensor in pending)
            numbers.update(zip((place for place, _ in pending), found, strict=True))
            pending.clear()
            phases.end("hash")

        for part in self._weights.parts():
            values = self._served(part)
            if not values.numel():
                continue
            finite.add(part.name, values)
            own = place_of(part)
            common = [
                TensorPlace(part.name, both)
                for each in wanted[part.name]
                if (both := own.box.overlap(each.box)) is not None
            ]
            places.append(own)
            cuts += common
            pending += [(each, cut(values, own.box, each.box)) for each in dict.fromkeys((own, *common))]
            pending_bytes += values.nbytes
            if pending_bytes >= _HELD_BYTES.get(values.device.type, 0):
                take()
                pending_bytes = 0
        take()
        if odd := finite.odd():
            raise SyncError(
                f"{self._what}: '{odd[0]}' holds a value that is not finite, or does not fit "
                f"{dtype_named(self._into[odd[0]].dtype)}"
            )
        return Held(places, [numbers[place] for place in places], [numbers[place] for place in cuts])

    def _served(self, part: Part) -> Tensor:
        form = self._into.get(part.name)
        if form is None:
            raise SyncError(f"{self._what}: '{part.name}' is sent, and no engine serves it")
        if tuple(part.full_shape) != tuple(form.shape):
            shapes = f"{list(part.full_shape)} and is served as {list(form.shape)}"
            raise SyncError(f"{self._what}: '{part.name}' is {shapes}")
        dtype = dtype_named(form.dtype)
        if part.tensor.dtype != dtype and not (part.tensor.dtype.is_floating_point and dtype.is_floating_point):
            types = f"{part.tensor.dtype} and is served as {dtype}"
            raise SyncError(f"{self._what}: '{part.name}' is {types}: its values would be others")
        return matrix(part.tensor.detach().to(dtype))


def fingerprints(forms: Mapping[str, Form], held: Sequence[Held], version: int, mode: str) -> Fingerprints:
    """Return the fingerprints of whole tensors. RanksDiverged if ranks that hold the same box hold different values."""
    of_rank = [dict(zip(each.places, each.digests, strict=True)) for each in held]
    numbers: list[tuple[str, int]] = []
    for place, ranks in holders([each.places for each in held]).items():
        by_value: defaultdict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            by_value[of_rank[rank][place]].append(rank)
        if len(by_value) > 1:
            groups = " and ".join(f"ranks {', '.join(map(str, each))}" for each in by_value.values())
            raise RanksDiverged(
                f"{mode}: version {version}: {groups} hold different values of {place}, which must be equal on all "
                "of them; go on from the last checkpoint"
            )
        numbers.append((place.name, of_rank[ranks[0]][place]))
    whole = digest.combine(numbers)
    return {name: digest.text(whole.get(name, 0)) for name in forms}


class StaleRanks:
    """Looks for a rank whose weights stayed while those of all the others moved: it did not take the step."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._version = -1
        self._before: list[dict[TensorPlace, int]] = []

    def check(self, held: Sequence[Held], version: int, sizes: Sizes) -> None:
        """RanksDiverged if some ranks state the very digests of the version before, although on every other rank most
        tensors have changed."""
        now = [dict(zip(each.places, each.digests, strict=True)) for each in held]
        version_before, before = self._version, self._before
        if len(before) == len(now) > 1 and version != version_before:
            total = sum(size.whole.num_elements for size in sizes.values())
            same: list[int] = []
            for rank, (old, new) in enumerate(zip(before, now, strict=True)):
                share = sum(place.box.num_elements for place in new) * 4 * len(now)
                kept = sum(old.get(place) == value for place, value in new.items())
                if kept == len(new) and share >= total:
                    same.append(rank)
                elif kept > len(new) // 2:
                    return self._remember(version, now)
            if 0 < len(same) < len(now):
                ranks = f"rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same))}"
                raise RanksDiverged(
                    f"{self._mode}: version {version}: the weights of {ranks} are those of version {version_before}, "
                    "and those of all other ranks have changed; go on from the last checkpoint"
                )
        self._remember(version, now)

    def _remember(self, version: int, now: list[dict[TensorPlace, int]]) -> None:
        self._version, self._before = version, now
