"""What ranks say about one version, put together: the fingerprints of whole tensors, and what each receiver must get.

No rank holds a whole tensor. Digests of boxes that do not overlap add up to the digest of the whole, so rank 0 needs
only numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.bridge.common.held_weights import Held
from tandem.bridge.common.packer import Form
from tandem.bridge.common.places import Places, TensorPlace, distinct, overlaps, whole_places
from tandem.errors import SyncError
from tandem.ops import digest
from tandem.ops.parts import Box

_MASK = 2**64 - 1


def served_places(
    replies: Sequence[Mapping[str, object]], forms: Mapping[str, Form], num_receivers: int, mode: str
) -> tuple[list[list[TensorPlace]], dict[str, list[list[TensorPlace]]]]:
    """Return the places of each receiver, in order, and the same by engine. A receiver whose engine has told no boxes
    takes whole tensors."""
    receivers: list[list[TensorPlace]] = []
    engines: dict[str, list[list[TensorPlace]]] = {}
    for reply in replies:
        boxes = reply.get("boxes") or [None] * int(reply.get("workers", 1))  # pyright: ignore[reportArgumentType]
        own = [whole_places(forms) if each is None else _told(each, forms, mode) for each in boxes]  # pyright: ignore
        engines[str(reply["boot_id"])] = own
        receivers += own
    if len(receivers) > num_receivers:
        raise SyncError(f"{mode}: engines have {len(receivers)} workers, and this connection has {num_receivers}")
    receivers += [whole_places(forms) for _ in range(num_receivers - len(receivers))]
    return receivers, engines


def _told(boxes: Sequence[Sequence[object]], forms: Mapping[str, Form], mode: str) -> list[TensorPlace]:
    try:
        places = [TensorPlace(str(name), Box(*(int(number) for number in box))) for name, *box in boxes]  # pyright: ignore
    except (TypeError, ValueError) as error:
        raise SyncError(f"{mode}: an engine's boxes are no names with four numbers each: {error}") from error
    if odd := next((place.name for place in places if place.name not in forms), None):
        raise SyncError(f"{mode}: an engine's worker serves a box of '{odd}', which is not in the engine's layout")
    return places


def expected_of_receivers(held: Sequence[Held], served: Sequence[Places], mode: str) -> list[list[str]]:
    """Return the digest that each place of each receiver must have when it has arrived."""
    wanted = distinct(served)
    sums = [0] * len(wanted)
    seen = set[TensorPlace]()
    for rank, each in enumerate(held):
        common = list(overlaps(each.places, wanted))
        if len(common) != len(each.cuts):
            raise SyncError(f"{mode}: rank {rank} states {len(each.cuts)} digests of {len(common)} cuts")
        new = [place not in seen for place in each.places]
        for (number, position, _), value in zip(common, each.cuts, strict=True):
            if new[number]:
                sums[position] = (sums[position] + value) & _MASK
        seen.update(each.places)
    texts = dict(zip(wanted, digest.texts(sums), strict=True))
    return [[texts[place] for place in places] for places in served]
