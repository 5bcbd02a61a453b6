"""The plan of boxes: every element reaches every place that serves it once, and no rank sends much more than its share.

Shapes, ranks and receivers are drawn at random, with a seed in each failure's name.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from tandem.bridge.collective.plan import SendPlan, chosen_owners, make_plan
from tandem.bridge.common.places import TensorPlace, TensorSize, check_held, check_served, overlaps
from tandem.errors import SyncError
from tandem.ops.parts import Box, box_of_rank, rows_and_cols

Sizes = dict[str, TensorSize]


@dataclass
class Case:
    sizes: Sizes
    held: list[list[TensorPlace]]
    served: list[list[TensorPlace]]
    bucket_bytes: int

    @property
    def plan(self) -> SendPlan:
        return make_plan(self.sizes, self.held, self.served, self.bucket_bytes)


def rows_of_ranks(sizes: Sizes, num_ranks: int) -> list[list[TensorPlace]]:
    """As FSDP2 cuts. Scalars and some buffers are whole on rank 0 alone."""
    held: list[list[TensorPlace]] = [[] for _ in range(num_ranks)]
    for name, size in sizes.items():
        if name.startswith("buffer") or not size.shape:
            held[0].append(TensorPlace(name, size.whole))
            continue
        for rank in range(num_ranks):
            if (box := box_of_rank(size.shape, rank, num_ranks)).num_elements:
                held[rank].append(TensorPlace(name, box))
    return held


def shards_of_workers(sizes: Sizes, num_workers: int) -> list[list[TensorPlace]]:
    """As vLLM cuts: some tensors by rows, some by columns; vectors are whole on every worker."""
    served: list[list[TensorPlace]] = [[] for _ in range(num_workers)]
    for name, size in sizes.items():
        rows, cols = rows_and_cols(size.shape)
        for worker, places in enumerate(served):
            if len(size.shape) < 2:
                box = size.whole
            elif name.startswith("down"):
                box = Box(0, rows, worker * cols // num_workers, (worker + 1) * cols // num_workers)
            else:
                box = Box(worker * rows // num_workers, (worker + 1) * rows // num_workers, 0, cols)
            places.append(TensorPlace(name, box))
    return served


def drawn(seed: int) -> Case:
    random_ = random.Random(seed)
    sizes: Sizes = {}
    for number in range(random_.randrange(1, 12)):
        shape = tuple(random_.choice((1, 2, 3, 7, 9)) for _ in range(random_.choice((0, 1, 1, 2, 2, 2, 3))))
        kind = random_.choice(("up", "down", "buffer"))
        sizes[f"{kind} {number}"] = TensorSize(shape, random_.choice((1, 2, 4, 8)))
    if random_.random() < 0.2:
        sizes["empty"] = TensorSize((0, 4), 4)
    num_ranks, engines = random_.choice((1, 2, 3, 4, 8)), random_.randrange(1, 4)
    served: list[list[TensorPlace]] = []
    for _ in range(engines):
        served += shards_of_workers(sizes, random_.choice((1, 2, 4)))
    return Case(sizes, rows_of_ranks(sizes, num_ranks), served, random_.choice((8, 64, 1000, 10**6)))


def elements(place: TensorPlace) -> list[tuple[str, int, int]]:
    top, bottom, left, right = place.box
    return [(place.name, row, col) for row in range(top, bottom) for col in range(left, right)]


@pytest.mark.parametrize("seed", range(150))
def test_every_receiver_gets_every_element_that_it_serves_once_from_a_rank_that_holds_it(seed: int) -> None:
    case = drawn(seed)
    check_held(case.sizes, case.held, len(case.held))
    got: list[Counter[tuple[str, int, int]]] = [Counter() for _ in case.served]
    for each in case.plan.rounds:
        for (rank, receiver), cuts in each.buckets.items():
            mine = {element for place in case.held[rank] for element in elements(place)}
            for cut in cuts:
                assert set(elements(cut.place)) <= mine
                got[receiver].update(elements(cut.place))
    for receiver, places in enumerate(case.served):
        assert got[receiver] == Counter(element for place in places for element in elements(place))


@pytest.mark.parametrize("seed", range(150))
def test_cuts_lie_one_behind_the_other_in_their_bucket_and_fit_it(seed: int) -> None:
    case = drawn(seed)
    largest = max((size.itemsize for size in case.sizes.values()), default=1)
    for each in case.plan.rounds:
        loads: Counter[tuple[str, int]] = Counter()
        for (rank, receiver), cuts in each.buckets.items():
            end = 0
            for cut in cuts:
                itemsize = case.sizes[cut.place.name].itemsize
                assert cut.offset >= end
                assert cut.offset % itemsize == 0
                end = cut.offset + cut.place.box.num_elements * itemsize
                loads["sender", rank] += cut.place.box.num_elements * itemsize
                loads["receiver", receiver] += cut.place.box.num_elements * itemsize
            assert end == each.sizes[rank, receiver]
        if case.bucket_bytes >= 1000:  # a smaller one may not hold a few single elements
            assert max(loads.values()) <= case.bucket_bytes + 64 * largest


def model(num_layers: int = 4, width: int = 256, vocabulary: int = 1031) -> Sizes:
    """A small transformer in bfloat16, with a vocabulary that no number of ranks divides."""
    sizes = {"embed": TensorSize((vocabulary, width), 2)}
    for layer in range(num_layers):
        for name in ("q", "k", "v", "down o"):
            sizes[f"{name} {layer}"] = TensorSize((width, width), 2)
        sizes |= {f"{name} {layer}": TensorSize((4 * width, width), 2) for name in ("gate", "up")}
        sizes[f"down {layer}"] = TensorSize((width, 4 * width), 2)
        sizes |= {f"norm {name} {layer}": TensorSize((width,), 2) for name in "ab"}
    return sizes | {"norm": TensorSize((width,), 2), "buffer": TensorSize((64,), 4)}


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_no_rank_sends_and_no_receiver_gets_more_than_its_share(num_ranks: int, num_workers: int) -> None:
    sizes = model()
    plan = make_plan(sizes, rows_of_ranks(sizes, num_ranks), shards_of_workers(sizes, num_workers), 2**16)
    total = sum(size.whole.num_elements * size.itemsize for size in sizes.values())
    sent = [sum(b.size_bytes for each in plan.rounds_of_rank(rank) for b in each) for rank in range(num_ranks)]
    got = [sum(b.size_bytes for each in plan.rounds_of_receiver(who) for b in each) for who in range(num_workers)]
    assert sum(sent) == sum(got) == plan.total_bytes
    assert max(sent) <= 1.05 * total / num_ranks
    assert max(got) <= 1.05 * total / num_workers


def test_all_ranks_send_in_every_round_also_of_one_large_tensor() -> None:
    sizes = {"embed": TensorSize((4096, 64), 4)}
    plan = make_plan(sizes, rows_of_ranks(sizes, 4), shards_of_workers(sizes, 1), 2**14)
    assert len(plan.rounds) == 64
    assert all({rank for rank, _ in each.buckets} == {0, 1, 2, 3} for each in plan.rounds)


def test_what_several_ranks_hold_is_sent_by_one_and_the_ranks_take_turns() -> None:
    sizes = {f"norm {number}": TensorSize((8,), 4) for number in range(12)}
    held = [[TensorPlace(name, size.whole) for name, size in sizes.items()] for _ in range(4)]
    check_held(sizes, held, 4)
    assert Counter(rank for _, rank in chosen_owners(sizes, held)) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_the_plan_is_the_same_wherever_it_is_made() -> None:
    assert drawn(3).plan == drawn(3).plan


def test_overlaps_are_told_in_the_order_of_both_lists() -> None:
    held = [TensorPlace("a", Box(0, 4, 0, 8)), TensorPlace("b", Box(0, 2, 0, 1))]
    served = [TensorPlace("b", Box(0, 9, 0, 1)), TensorPlace("a", Box(2, 8, 0, 4)), TensorPlace("a", Box(0, 2, 4, 8))]
    assert list(overlaps(held, served)) == [
        (0, 1, TensorPlace("a", Box(2, 4, 0, 4))),
        (0, 2, TensorPlace("a", Box(0, 2, 4, 8))),
        (1, 0, TensorPlace("b", Box(0, 2, 0, 1))),
    ]


# --- what is refused


def two_ranks() -> tuple[Sizes, list[list[TensorPlace]]]:
    sizes = {"x": TensorSize((8, 4), 2), "y": TensorSize((3,), 2)}
    return sizes, rows_of_ranks(sizes, 2)


def held_with(rank: int, *boxes: Box) -> tuple[Sizes, list[list[TensorPlace]]]:
    """`x` of that rank is these boxes."""
    sizes, held = two_ranks()
    held[rank] = [*(TensorPlace("x", box) for box in boxes), *(place for place in held[rank] if place.name != "x")]
    return sizes, held


FAULTS = {
    "left out": (held_with(1), r"name 16 of the 32 elements of 'x'; the others are left out"),
    "twice": (held_with(1, Box(4, 8, 0, 4), Box(4, 8, 0, 4)), r"rank 1 names 'x', rows 4 to 8 .* twice"),
    "swapped": (held_with(1, Box(0, 4, 0, 4)), r"rank 1 says that it holds 'x', rows 0 to 4 .*; its rows are 4 to 8"),
    "off by one": (held_with(1, Box(3, 7, 0, 4)), r"rank 1 says that it holds 'x', rows 3 to 7"),
    "too long": (
        held_with(1, Box(4, 9, 0, 4)),
        r"rank 1 names 'x', rows 4 to 9 .*, and the tensor is of shape \[8, 4\]",
    ),
    "columns for rows": (
        held_with(1, Box(0, 8, 2, 4)),
        r"rank 1 says that it holds 'x', rows 0 to 8 and columns 2 to 4",
    ),
    "whole on one": (held_with(1, Box(0, 8, 0, 4)), r"name 'x', rows 0 to 4 .* more than once"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_that_do_not_hold_every_element_once_are_refused_by_name(fault: str) -> None:
    (sizes, held), says = FAULTS[fault]
    with pytest.raises(SyncError, match=says):
        check_held(sizes, held, 2)


def test_a_name_that_no_engine_serves_is_refused() -> None:
    sizes, held = two_ranks()
    held[1].append(TensorPlace("z", Box(0, 1, 0, 1)))
    with pytest.raises(SyncError, match="rank 1 names 'z', which is not served"):
        check_held(sizes, held, 2)


SERVED = {
    "off by one": (Box(3, 8, 0, 4), "workers of engine e name 'x', rows 3 to 4 .* more than once"),
    "left out": (Box(5, 8, 0, 4), "workers of engine e name 28 of the 32 elements of 'x'"),
    "columns for rows": (
        Box(0, 8, 2, 4),
        "workers of engine e name 'x', rows 0 to 4 and columns 2 to 4 more than once",
    ),
    "outside": (Box(4, 12, 0, 4), r"worker 1 of engine e names 'x', rows 4 to 12 .*shape \[8, 4\]"),
}


@pytest.mark.parametrize("fault", SERVED)
def test_workers_that_do_not_serve_every_element_are_refused_by_name(fault: str) -> None:
    box, says = SERVED[fault]
    sizes = {"x": TensorSize((8, 4), 2)}
    with pytest.raises(SyncError, match=says):
        check_served(sizes, {"e": [[TensorPlace("x", Box(0, 4, 0, 4))], [TensorPlace("x", box)]]})


def test_workers_of_one_engine_may_serve_the_same_and_engines_are_checked_apart() -> None:
    sizes = {"x": TensorSize((8, 4), 2), "k": TensorSize((2, 4), 2)}
    replicated = [[TensorPlace("x", Box(4 * n, 4 * n + 4, 0, 4)), TensorPlace("k", sizes["k"].whole)] for n in range(2)]
    check_served(sizes, {"e": replicated, "f": [[TensorPlace(name, size.whole) for name, size in sizes.items()]]})
    with pytest.raises(SyncError, match="workers of engine f name 0 of the 8 elements of 'k'"):
        check_served(sizes, {"e": replicated, "f": [[TensorPlace("x", sizes["x"].whole)]]})


def test_hsdp_replicas_hold_the_rows_of_their_place_within_the_host() -> None:
    sizes, _ = two_ranks()
    held = rows_of_ranks(sizes, 2) * 2
    check_held(sizes, held, 2)
    with pytest.raises(SyncError, match=r"rank 0 says that it holds 'x', rows 0 to 4 .*; its rows are 0 to 2"):
        check_held(sizes, held, 4)
