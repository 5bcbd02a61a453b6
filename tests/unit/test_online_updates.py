"""Updates: exact both ways for every kind of number, small for what a 16-bit optimizer does, and never half done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.errors import CheckpointDamaged, CheckpointError
from tandem.online import bit_planes, delta_codec
from tandem.online.weight_deltas import HeldVersion, Update, apply_updates, digest_of_all, make_update, size_of_change
from tandem.ops import digest

Tensors = dict[str, Tensor]
DTYPES = ["bfloat16", "float16", "float32", "float64", "int64", "int8", "uint8", "bool", "float8_e4m3fn"]


def weights(seed: int = 0, width: int = 64) -> Tensors:
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(4 * width, width) * 0.02,
        "proj": torch.randn(width, 3, width) * 0.02,
        "norm": torch.ones(width),
        "scale": torch.tensor(0.5),
        "none": torch.zeros(0, width),
    }


def random_bits(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(*shape) < 0.5
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(a: Tensors, b: Tensors) -> bool:
    def raw(tensor: Tensor) -> Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return a.keys() == b.keys() and all(torch.equal(raw(a[name]), raw(b[name])) for name in a)


def there(*updates: Update) -> list[Callable[[], Update]]:
    return [lambda each=each: each for each in updates]


def history(nudge: Callable[[Tensors, int], None], start: Tensors, steps: int) -> tuple[list[Tensors], list[Update]]:
    live, held = copied(start), HeldVersion.copy_of(0, start)
    states, updates = [copied(live)], list[Update]()
    for version in range(1, steps + 1):
        nudge(live, version)
        updates.append(make_update(version, held, live, {}))
        states.append(copied(live))
        assert held.version == version
        assert same(dict(held.tensors), live)
    return states, updates


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("share", [0.01, 0.9])
def test_every_bit_pattern_comes_back_in_both_directions(name: str, share: float):
    torch.manual_seed(1)
    dtype = getattr(torch, name)
    start = {"a": random_bits(dtype, (40, 24)), "b": random_bits(dtype, (7,)), "c": random_bits(dtype, (3, 5, 4))}

    def nudge(live: Tensors, version: int) -> None:
        for tensor in live.values():
            raw = tensor.view(-1).view(torch.uint8).view(-1, dtype.itemsize)
            where = torch.rand(len(raw)) < share
            raw[where] = random_bits(dtype, (len(raw),)).view(torch.uint8).view(-1, dtype.itemsize)[where]

    states, updates = history(nudge, start, 3)
    held = HeldVersion.copy_of(0, start)
    apply_updates(held, there(*updates))
    assert same(dict(held.tensors), states[3])
    apply_updates(held, there(*updates[::-1]), threads=2)
    assert same(dict(held.tensors), states[0])
    assert held.digests == HeldVersion.of(0, states[0]).digests


def test_a_step_of_one_unit_wraps_where_the_bits_do():
    start = {"a": torch.tensor([-1, 0, 32767, -32768], dtype=torch.int16).view(torch.bfloat16).repeat(8)}
    after = {"a": start["a"].clone()}
    after["a"].view(torch.int16)[:2] = torch.tensor([32767, -32768], dtype=torch.int16)
    held = HeldVersion.copy_of(0, start)
    update = make_update(1, held, after, {})
    assert same(dict(held.tensors), after)
    apply_updates(held, there(update))
    assert same(dict(held.tensors), start)


def test_16_bit_weights_that_all_change_take_16_bits_each():
    start = {"a": random_bits(torch.bfloat16, (600,))}
    held = HeldVersion.copy_of(0, start)
    (block,) = make_update(1, held, {"a": random_bits(torch.bfloat16, (600,))}, {}).blocks
    assert block.coded == "all"
    assert block.sizes == {"bits.low16": 1200}


def lr_step(master: Tensors, lr: float) -> Callable[[Tensors, int], None]:
    def nudge(live: Tensors, version: int) -> None:
        torch.manual_seed(version)
        for name, exact in master.items():
            exact += torch.randn_like(exact) * lr
            live[name].copy_(exact)

    return nudge


def test_at_lr_1e_6_a_bf16_update_is_smaller_than_a_fiftieth_of_the_weights_and_exact():
    master = {"w": torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * 0.02}
    start = {name: tensor.to(torch.bfloat16) for name, tensor in master.items()}
    states, updates = history(lr_step(master, 1e-6), start, 2)
    coded_bytes = sum(len(block.raw) for block in updates[1].blocks)
    full_bytes = sum(tensor.nbytes for tensor in states[1].values())
    changed = int((states[1]["w"] != states[2]["w"]).sum())
    assert updates[1].changed == changed > 0.02 * updates[1].total
    assert coded_bytes < full_bytes / 50


def test_the_entropy_of_places_is_met_within_half_a_bit():
    generator = torch.Generator().manual_seed(0)
    for share in (0.0005, 0.005, 0.03, 0.2, 0.6):
        index_N = (torch.rand(400_000, generator=generator) < share).nonzero().squeeze(1)
        p = torch.tensor(share, dtype=torch.float64)
        ideal_bits = (-(p * p.log2() + (1 - p) * (1 - p).log2()) / p).item()
        coded = bit_planes.rising("at", index_N)
        bits = 8 * sum(len(plane) for plane in coded.values()) / len(index_N)
        assert bits < ideal_bits + (0.65 if share < 0.5 else 1.1), (share, bits, ideal_bits)
        assert torch.equal(bit_planes.read_rising(coded, "at", torch.device("cpu")), index_N)


COLUMNS = {
    "one zero": [0],
    "zeros": [0] * 1000,
    "one that is all bits": [2**32 - 1],
    "all bits here and there": [2**32 - 1 if n % 37 == 0 else 0 for n in range(1000)],
    "long tail": [int(1 / (n + 1) * 70_000) for n in range(5000)],
    "every length": [2**n for n in range(32)] * 3,
    "two kinds": [3, 70_000] * 50 + [1] * 5000,
    "a byte each": [n % 256 for n in range(999)],
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_any_kind_come_back(name: str):
    column_N, cpu = torch.tensor(COLUMNS[name]), torch.device("cpu")
    coded = bit_planes.words("size", column_N)
    assert torch.equal(bit_planes.read_words(coded, "size", len(column_N), cpu).long() & 0xFFFFFFFF, column_N)
    most = max(COLUMNS[name]).bit_length()
    assert sum(len(plane) for plane in coded.values()) <= most * -(-len(column_N) // 8)


def test_what_is_large_and_rare_is_kept_apart():
    column_N = torch.zeros(80_000, dtype=torch.int64)
    column_N[::1000] = torch.arange(80) + 1000
    coded = bit_planes.words("size", column_N)
    assert sum(len(plane) for plane in coded.values()) < 80 * 24 // 8 < 80_000 * 10 // 8


@pytest.mark.parametrize("name", ["at.high", "at.low", "sign", "size.low"])
def test_a_plane_that_is_cut_is_refused(name: str):
    start = {"w": torch.arange(20_000, dtype=torch.int16)}
    after = {"w": start["w"].clone()}
    after["w"][5::1700] += torch.arange(1, 13, dtype=torch.int16)
    (block,) = make_update(1, HeldVersion.copy_of(0, start), after, {}).blocks
    whole = block.planes_on(torch.device("cpu"))
    cut = {key: plane[:-1] if key.startswith(name) else plane for key, plane in whole.items()}
    assert [len(plane) for plane in cut.values()] != [len(plane) for plane in whole.values()]
    with pytest.raises(CheckpointDamaged, match="plane"):
        delta_codec.apply_block(block, cut, dict(after), {"w": 0}, forward=False)


def test_ten_versions_of_a_million_weights_go_back_in_less_than_a_fifth_of_a_second():
    """Of processor time, all threads together: other processes are none of it, but for the caches that they fill."""
    master = {f"w{i}": torch.randn(256, 256) * 0.02 for i in range(16)}
    for dtype, lr in ((torch.bfloat16, 1e-6), (torch.float32, 1e-6), (torch.float32, 3e-3)):
        start = {name: tensor.to(dtype) for name, tensor in master.items()}
        states, updates = history(lr_step(copied(master), lr), start, 10)
        held, best = HeldVersion.copy_of(10, states[10]), 9.0
        for _ in range(10):
            started = time.process_time()
            apply_updates(held, there(*updates[::-1]))
            best = min(best, time.process_time() - started)
            assert same(dict(held.tensors), states[0])
            apply_updates(held, there(*updates))
            if best < 0.2:
                break
        assert best < 0.2, (dtype, lr, best)


def test_views_of_fused_memory_and_strided_ones_are_written_where_they_lie():
    fused = torch.randn(96, 32)
    live = {"q": fused[:64], "k": fused[64:], "turned": torch.randn(16, 8).t()}
    held = HeldVersion.of(0, live)
    after = {name: tensor + (torch.rand(tensor.shape) < 0.1) * 1e-3 for name, tensor in live.items()}
    make_update(1, held, after, {})
    assert torch.equal(fused[:64], after["q"])
    assert torch.equal(fused[64:], after["k"])
    assert torch.equal(live["turned"], after["turned"])


def test_large_tensors_are_taken_in_parts_of_different_kinds(monkeypatch: pytest.MonkeyPatch):
    """Of each part another share changes: none, single elements, half of them, all."""
    monkeypatch.setattr(delta_codec, "PART", 500)
    monkeypatch.setattr(delta_codec, "BLOCK", 300)
    start = {"a": torch.randn(4, 3, 500), "b": torch.randn(2000).to(torch.bfloat16), "c": torch.randn(30)}

    def nudge(live: Tensors, version: int) -> None:
        torch.manual_seed(version)
        for tensor in live.values():
            share = torch.tensor([0.0, 0.004, 0.02, 0.5, 1.0])[torch.randint(0, 5, (tensor.numel() // 500 + 1,))]
            where = torch.rand(tensor.shape).view(-1) < share.repeat_interleave(500)[: tensor.numel()]
            tensor.view(-1)[where] *= 1.01

    states, updates = history(nudge, start, 6)
    assert {block.coded for update in updates for block in update.blocks} == {"some", "all"}
    assert max(len(update.blocks) for update in updates) > 3
    held = HeldVersion.copy_of(6, states[6])
    for there_, version in ((updates[2:], 2), (updates[2:4], 4), (updates[:4], 0), (updates, 6)):
        way = there_ if version > held.version else there_[::-1]
        apply_updates(held, there(*way), threads=2)
        assert held.version == version
        assert same(dict(held.tensors), states[version])
        assert held.digests == HeldVersion.of(version, states[version]).digests


def test_digests_of_elements_that_changed_are_those_of_the_whole_tensors():
    torch.manual_seed(3)
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
        before = random_bits(dtype, (9, 4, 5))
        after = before.clone()
        after.view(-1)[::7] = random_bits(dtype, (26,))
        width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[dtype.itemsize]
        old_N, new_N = before.view(-1).view(width), after.view(-1).view(width)
        index_N = (old_N != new_N).nonzero().squeeze(1)
        change = digest.ElementChange("t", len(old_N) // 9, index_N, old_N[index_N], new_N[index_N])
        moved = digest.changes([change])[0]
        assert (digest.piece(before, "t") + moved) % 2**64 == digest.piece(after, "t"), dtype


def test_nothing_changed_is_an_update_too():
    start = weights()
    held = HeldVersion.copy_of(4, start)
    update = make_update(5, held, copied(start), {"why": "a job without effect"})
    assert (update.changed, list(update.blocks), update.touched) == (0, [], {})
    apply_updates(held, there(update))
    assert held.version == 4


def test_an_update_of_another_format_is_refused_and_says_what_to_do():
    start, live = weights(), copied(weights())
    live["embed"] += 1
    update = make_update(1, HeldVersion.copy_of(0, start), live, {})
    for head in ({**update.head(), "format": 3}, {key: told for key, told in update.head().items() if key != "format"}):
        with pytest.raises(CheckpointError, match="this Tandem reads 2: use the release that wrote it") as refused:
            Update.from_head(head, [block.raw for block in update.blocks])
        assert not isinstance(refused.value, CheckpointDamaged)


def test_an_update_survives_as_json_and_bytes():
    start, live = weights(), copied(weights())
    live["embed"][3, :5] += 1
    update = make_update(1, HeldVersion.copy_of(0, start), live, {"job": "j1"})
    again = Update.from_head(json.loads(json.dumps(update.head())), [block.raw for block in update.blocks])
    held = HeldVersion.copy_of(0, start)
    apply_updates(held, there(again))
    assert same(dict(held.tensors), live)
    assert (again.notes, again.digest) == ({"job": "j1"}, digest_of_all(HeldVersion.of(0, live).digests))


# --- what must not happen


def two_updates() -> tuple[list[Tensors], list[Update]]:
    return history(lr_step(weights(), 1e-3), {name: each.to(torch.bfloat16) for name, each in weights().items()}, 2)


def test_an_update_to_another_version_is_refused_and_leaves_everything_as_it_was():
    states, updates = two_updates()
    held = HeldVersion.copy_of(0, states[0])
    with pytest.raises(CheckpointError, match="leads from version 1 to 2, but these weights are of version 0"):
        apply_updates(held, there(updates[1]))
    with pytest.raises(CheckpointError, match="are of version 2"):
        apply_updates(held, there(updates[0], updates[1], updates[0]))
    assert held.version == 0
    assert same(dict(held.tensors), states[0])
    assert held.digests == HeldVersion.of(0, states[0]).digests


def test_weights_that_somebody_wrote_to_are_noticed_before_and_after():
    states, updates = two_updates()
    held = HeldVersion.copy_of(0, states[0])
    held.tensors["embed"][0, 0] += 1  # behind its back
    with pytest.raises(CheckpointDamaged, match="'embed'"):
        apply_updates(held, there(updates[0]))
    lied = HeldVersion(0, states[0], {**HeldVersion.of(0, states[0]).digests, "embed": 7})
    with pytest.raises(CheckpointError, match="were overwritten"):
        apply_updates(lied, there(updates[0]))
    with pytest.raises(CheckpointDamaged, match="'embed'"):  # and so is a stale copy when an update is made
        make_update(3, HeldVersion(0, copied(states[1]), HeldVersion.of(0, states[0]).digests), states[2], {})


def test_a_piece_that_cannot_be_read_leaves_everything_as_it_was():
    states, updates = two_updates()
    last = updates[1].blocks[-1]
    broken = replace(updates[1], blocks=[*updates[1].blocks[:-1], replace(last, raw=last.raw[:-8])])
    held = HeldVersion.copy_of(0, states[0])
    with pytest.raises(CheckpointDamaged, match="plane"):
        apply_updates(held, there(updates[0], broken))
    assert (held.version, same(dict(held.tensors), states[0])) == (0, True)


def test_steps_that_lead_elsewhere_are_taken_back():
    states, updates = two_updates()
    name = next(iter(updates[1].touched))
    before, after = updates[1].touched[name]
    wrong = replace(updates[1], touched={**updates[1].touched, name: (before, after ^ 1)})
    held = HeldVersion.copy_of(0, states[0])
    with pytest.raises(CheckpointDamaged, match="stay at version 0"):
        apply_updates(held, there(updates[0], wrong))
    assert (held.version, same(dict(held.tensors), states[0])) == (0, True)


def test_steps_and_flipped_bits_are_taken_back_in_their_order():
    """They do not commute."""
    start = {"a": torch.randn(4000, generator=torch.Generator().manual_seed(0))}

    def nudge(live: Tensors, version: int) -> None:
        live["a"][:: 30 if version == 1 else 1] *= 1.7

    states, updates = history(nudge, start, 3)
    assert [update.blocks[0].coded for update in updates] == ["some", "all", "all"]
    before, after = updates[2].touched["a"]
    wrong = replace(updates[2], touched={"a": (before, after ^ 1)})
    held = HeldVersion.copy_of(0, states[0])
    with pytest.raises(CheckpointDamaged, match="stay at version 0"):
        apply_updates(held, there(updates[0], updates[1], wrong))
    assert (held.version, same(dict(held.tensors), states[0])) == (0, True)


def test_other_models_are_refused():
    states, _ = two_updates()
    held = HeldVersion.copy_of(0, states[0])
    with pytest.raises(CheckpointError, match="another model or precision"):
        make_update(1, held, {name: tensor.float() for name, tensor in states[0].items()}, {})
    with pytest.raises(CheckpointError, match="another model or precision"):
        held.restore({"embed": states[0]["embed"]})


def test_a_dropped_job_leaves_no_bit_behind():
    start = weights()
    held, live = HeldVersion.copy_of(0, start), copied(start)
    for tensor in live.values():
        tensor.mul_(3)
    held.restore(live)
    assert same(live, start)


def test_weights_that_are_moved_themselves_take_what_rests_along():
    states, updates = two_updates()
    held, live = HeldVersion.copy_of(2, states[2]), copied(states[2])
    home = held.tensors
    with held.using(live):
        apply_updates(held, there(*updates[::-1]))
    assert (held.version, held.tensors) == (0, home)
    assert same(dict(held.tensors), states[0])
    assert same(live, states[0])
    assert held.digests == HeldVersion.of(0, states[0]).digests


def test_weights_whose_move_fails_are_as_they_were():
    states, updates = two_updates()
    held, live = HeldVersion.copy_of(2, states[2]), copied(states[2])
    numbers = dict(held.digests)

    def moved(way: Sequence[Update], error: BaseException | None = None) -> None:
        with held.using(live):
            apply_updates(held, there(*way))
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        moved(updates[::-1], KeyboardInterrupt())
    with pytest.raises(CheckpointError, match="leads from version 0 to 1"):
        moved(updates)
    assert (held.version, held.digests) == (2, numbers)
    assert same(dict(held.tensors), states[2])
    assert same(live, states[2])


def test_weights_that_are_not_what_they_are_taken_for_are_made_that_before_they_move():
    """Digests that are followed element by element would fit in the end."""
    start = {"a": torch.randn(200, 200, generator=torch.Generator().manual_seed(0))}
    live, held = copied(start), HeldVersion.copy_of(0, start)
    live["a"][3, :5] += 1
    update = make_update(1, held, live, {})
    live["a"][0, 0] += 7
    with held.using(live):
        apply_updates(held, there(update))
    assert same(live, start)
    assert same(dict(held.tensors), start)


def test_places_beyond_a_tensor_leave_everything_as_it_was():
    states, updates = two_updates()
    index, block = next((n, each) for n, each in enumerate(updates[1].blocks) if each.coded == "some")
    odd = replace(block, parts=[(name, start + 10**9, count) for name, start, count in block.parts])
    broken = replace(updates[1], blocks=[*updates[1].blocks[:index], odd, *updates[1].blocks[index + 1 :]])
    held = HeldVersion.copy_of(0, states[0])
    with pytest.raises((IndexError, RuntimeError)):
        apply_updates(held, there(updates[0], broken))
    assert (held.version, same(dict(held.tensors), states[0])) == (0, True)
    assert held.digests == HeldVersion.of(0, states[0]).digests


def test_the_size_of_a_change_in_closed_form():
    before = {"a": torch.full((4, 4), 3.0), "b": torch.zeros(2, dtype=torch.bfloat16)}
    after = {"a": before["a"].clone(), "b": before["b"].clone()}
    after["a"][0, 0] = 7.0
    found = size_of_change(before, after)
    assert (found.norm, found.relative, found.changed, found.total) == (4.0, 4 / 12, 1, 18)
    after["b"][1] = float("nan")
    assert size_of_change(before, after).not_finite == ["b"]
