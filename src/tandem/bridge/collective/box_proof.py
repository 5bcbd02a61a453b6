"""What ranks say about one version, put together: the fingerprints of whole tensors, and what each receiver must get.

No rank holds a whole tensor. Digests of boxes that do not overlap add up to the digest of the whole, so rank 0 needs
only numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from tandem.bridge.collective.boxes import Held, distinct, whole_places
from tandem.bridge.collective.plan import Place, Places, Sizes, holders, overlaps
from tandem.bridge.common.packer import Form
from tandem.errors import RanksDiverged, SyncError
from tandem.ops import digest
from tandem.ops.parts import Box
from tandem.types import Fingerprints

_MASK = 2**64 - 1


def served_places(
    replies: Sequence[Mapping[str, object]], forms: Mapping[str, Form], num_receivers: int, mode: str
) -> tuple[list[list[Place]], dict[str, list[list[Place]]]]:
    """Return the places of each receiver, in order, and the same by engine. A receiver whose engine has told no boxes
    takes whole tensors."""
    receivers: list[list[Place]] = []
    engines: dict[str, list[list[Place]]] = {}
    for reply in replies:
        boxes = reply.get("boxes") or [None] * int(reply.get("workers", 1))  # pyright: ignore[reportArgumentType]
        own = [whole_places(forms) if each is None else _told(each, forms, mode) for each in boxes]  # pyright: ignore
        engines[str(reply["boot_id"])] = own
        receivers += own
    if len(receivers) > num_receivers:
        raise SyncError(f"{mode}: engines have {len(receivers)} workers, and this connection has {num_receivers}")
    receivers += [whole_places(forms) for _ in range(num_receivers - len(receivers))]
    return receivers, engines


def _told(boxes: Sequence[Sequence[object]], forms: Mapping[str, Form], mode: str) -> list[Place]:
    try:
        places = [Place(str(name), Box(*(int(number) for number in box))) for name, *box in boxes]  # pyright: ignore
    except (TypeError, ValueError) as error:
        raise SyncError(f"{mode}: an engine's boxes are no names with four numbers each: {error}") from error
    if odd := next((place.name for place in places if place.name not in forms), None):
        raise SyncError(f"{mode}: an engine's worker serves a box of '{odd}', which is not in the engine's layout")
    return places


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


def expected_of_receivers(held: Sequence[Held], served: Sequence[Places], mode: str) -> list[list[str]]:
    """Return the digest that each place of each receiver must have when it has arrived."""
    wanted = distinct(served)
    sums = [0] * len(wanted)
    seen = set[Place]()
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


class StaleRanks:
    """Looks for a rank whose weights stayed while those of all the others moved: it did not take the step."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._version = -1
        self._before: list[dict[Place, int]] = []

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

    def _remember(self, version: int, now: list[dict[Place, int]]) -> None:
        self._version, self._before = version, now
