"""What several ranks share of a step: its micro-batches, which rank computes which, and how gradients are added."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from tandem.ops import row_packing
from tandem.ops.byte_sizes import shares_unmasked
from tandem.train import balance, micro_wire
from tandem.train.batch_packing import make_batch, plain_row
from tandem.train.gradient_tree import TreeSum, largest_of, norm_of, row_squares, sum_in_steps, tree
from tandem.types import Trajectory


def leaves(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(257, generator=generator) * 10.0 ** (i % 7) for i in range(count)]


def summed(count: int, ranks: int, add=tree) -> torch.Tensor:
    """The sum of so many micro-batches, as `ranks` ranks make it."""
    total = TreeSum()
    for each in balance.dealt(leaves(count), ranks):
        total.add({"w": add([leaf.clone() for leaf in each if leaf is not None])})
    return total.take()["w"]


@pytest.mark.parametrize(("count", "shares"), [(1, 4), (3, 4), (4, 4), (6, 4), (11, 4), (16, 2), (5, 1)])
def test_a_share_gets_its_part_of_the_costs_and_no_micro_batch_twice(count, shares):
    costs = sorted(range(10, 10 + count), reverse=True)
    found = balance.leaves(costs, shares, by_step=True)
    assert sorted(each for leaf in found for each in leaf) == sorted(costs)
    assert len(found) == min(count, shares)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    if count % (2 * shares) == 0:
        assert len({sum(leaf) for leaf in found}) == 1  # there and back
    assert balance.leaves(costs, shares, by_step=False) == [[each] for each in costs]


def test_a_rank_with_less_to_do_begins_with_nothing():
    rounds = balance.dealt([["a", "b"], ["c", "d"], ["e"]], 2)
    assert balance.widths(rounds) == [2, 1]
    assert balance.of_rank(rounds, 0) == ["a", "b", "e"]
    assert balance.of_rank(rounds, 1) == ["c", "d", None]
    assert balance.of_rank(balance.dealt([["a", "b"], ["c"]], 2), 1) == [None, "c"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 21])
def test_1_2_4_and_8_ranks_add_to_the_same_bits(count):
    one = summed(count, 1)
    assert all(torch.equal(one, summed(count, ranks)) for ranks in (2, 4, 8))
    assert torch.allclose(one, torch.stack(leaves(count)).sum(0), rtol=1e-4, atol=1e-2)


def test_a_sum_in_another_order_shows():
    """Planted: ranks add one after the other, as most reduce-scatters do."""

    def in_sequence(parts: list[torch.Tensor]) -> torch.Tensor:
        return sum(parts[1:], parts[0])

    assert not torch.equal(summed(16, 8, in_sequence), summed(16, 1))


def test_a_tree_of_rounds_keeps_few_sums():
    total = TreeSum()
    for leaf in leaves(64):
        total.add({"w": leaf})
        assert sum(level is not None for level in total._levels) <= 7
    assert len(total.take()) == 1
    assert total.take() == {}


def test_a_gradient_that_a_round_lacks_is_that_of_the_others():
    total = TreeSum()
    for number in range(3):
        total.add({"a": torch.ones(2)} | ({"b": torch.ones(2)} if number == 1 else {}))
    assert {name: value.tolist() for name, value in total.take().items()} == {"a": [3.0, 3.0], "b": [1.0, 1.0]}


def test_the_norm_is_the_same_whoever_holds_the_rows():
    gradient = torch.randn(103, 64, generator=torch.Generator().manual_seed(0)) * 1e-3

    def norm(*ranks: Sequence[torch.Tensor]) -> float:
        squares = [row_squares({str(number): part for number, part in enumerate(parts)}) for parts in ranks]
        largest = max(map(largest_of, squares))
        return norm_of(sum(sum_in_steps(each, largest) for each in squares), largest)

    whole = norm([gradient])
    for cuts in ([50, 53], [26, 26, 26, 25], [103]):
        parts = gradient.split(cuts)
        assert norm(parts) == norm(*([part] for part in parts)) == norm(*([part] for part in reversed(parts))) == whole
    assert whole == pytest.approx(gradient.double().norm().item(), rel=1e-6)
    assert norm([torch.zeros(3, 2)]) == norm([]) == 0.0
    assert math.isnan(norm([torch.tensor([[1.0], [math.nan]])]))


# --- which micro-batches


@pytest.mark.parametrize("seed", range(6))
def test_micro_batches_come_in_multiples_and_hold_every_row_once(seed):
    rng = random.Random(seed)
    widths = [rng.randrange(3, 200) for _ in range(rng.randrange(8, 60))]
    for multiple in (2, 4, 8):
        parts = row_packing.in_multiples(widths, 512, 1, multiple)
        assert sorted(index for part in parts for index in part) == list(range(len(widths)))
        assert len(parts) % multiple == 0
        assert all(max(widths[i] for i in part) * len(part) <= 512 for part in parts if len(part) > 1)
        costs = [row_packing.cost(len(part), max(widths[i] for i in part)) for part in parts]
        assert costs == sorted(costs, reverse=True)
        assert balance.imbalance(costs, multiple) < 0.5


def test_rows_that_would_be_mostly_padding_have_a_call_of_their_own():
    widths = [1000, 100, 90, 980, 110, 30]
    assert row_packing.micro_batches(widths, 4000) == [[0, 3, 4, 1], [2, 5]]
    assert row_packing.micro_batches(widths, 4000, most_padding=64) == [[0, 3], [4, 1, 2], [5]]


def test_too_few_rows_give_fewer_micro_batches():
    assert [len(part) for part in row_packing.in_multiples([9, 8, 7], 512, 1, 4)] == [1, 1, 1]
    assert balance.dealt(["a", "b", "c"], 4) == [["a", "b", "c", None]]
    assert row_packing.in_multiples([], 512, 1, 4) == []


def test_a_perfect_split_has_no_imbalance():
    assert balance.imbalance([5, 5, 5, 5], 2) == 0.0
    assert balance.imbalance([6, 2], 2) == pytest.approx(0.5)
    assert balance.imbalance([], 2) == 0.0


def batch_of(lengths: list[int], multiple: int):
    from tandem.algo import sft

    groups = [[Trajectory(list(range(2, n + 2)), [False] + [True] * (n - 1), [0.0] * n, [-1] * n)] for n in lengths]
    return make_batch(
        groups, sft.make(), micro_tokens=256, version=0, shares=shares_unmasked, device=torch.device("cpu"),
        multiple=multiple,
    )  # fmt: skip


def test_a_batch_is_split_finer_and_loses_no_token():
    lengths = [40, 30, 30, 20, 10, 10, 5, 5]  # packed into few rows, which are cut
    one, four = batch_of(lengths, 1), batch_of(lengths, 4)
    assert (len(one.micro), len(four.micro)) == (1, 4)
    assert one.totals == four.totals
    assert sum(len(micro.target_N) for micro in four.micro) == len(one.micro[0].target_N)


# --- on the wire


def test_micro_batches_arrive_as_they_were_sent():
    (micro,) = batch_of([9, 7, 3], 1).micro
    micro.reference_N = torch.randn(len(micro.target_N))
    micro.hold = 0.25
    sent = [micro, None, plain_row([3, 4, 5], 1, torch.device("cpu"))]
    arrived = micro_wire.unpack(micro_wire.pack(sent), torch.device("cpu"))
    assert arrived[1] is None
    for before, after in ((sent[0], arrived[0]), (sent[2], arrived[2])):
        assert before is not None
        assert after is not None
        for name in micro_wire._TENSORS:
            ours, theirs = getattr(before, name), getattr(after, name)
            assert ours is theirs if ours is None else torch.equal(ours, theirs) and ours.dtype == theirs.dtype
        assert after.hold == before.hold
        for ours, theirs in zip(before.packed.spans, after.packed.spans, strict=True):
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
        assert torch.equal(before.packed.place_of, after.packed.place_of)
