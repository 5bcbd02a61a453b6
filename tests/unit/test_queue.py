"""The rollout queue: MemoryStore's semantics, and leases, shares, silence and idempotency keys."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from queue_rig import RUN, Rig, group, names, rigged, settle

from tandem.errors import Conflict, Fenced, GroupRefused, NotKnown, QueueFull, Starved, StoreFull
from tandem.io.request_key import RequestKey
from tandem.rollout.queue.types import RegisteredEnvironment, TrainerSpec
from tandem.rollout.wire import codec

SEQUENCES = TrainerSpec("run", sequences_per_step=8, max_lag=-1)


# --- as MemoryStore


def test_groups_are_handed_out_in_the_order_in_which_they_started(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        tickets = await rig.admit(4)
        taking = asyncio.create_task(rig.take(2, wait_s=5))
        for ticket in (tickets[3], tickets[1], tickets[2]):
            await rig.put(str(ticket), ticket=ticket)
            await settle()
            assert not taking.done()  # three have finished, but the oldest has not
        await rig.put(str(tickets[0]), ticket=tickets[0])
        assert names(await taking) == [str(ticket) for ticket in tickets[:2]]
        assert names(await rig.take(2)) == [str(ticket) for ticket in tickets[2:]]

    rigged(tmp_path, scenario)


def test_a_slot_is_held_from_admit_to_release_and_not_only_to_take_or_ack(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        for ticket in await rig.admit(9):
            await rig.put(ticket=ticket)
        first = await rig.take(2)
        assert first is not None
        await rig.queue.trainer.ack(rig.epoch, [first.id])
        assert await rig.admit() == []
        waiting = asyncio.create_task(rig.admit(wait_s=5))
        await settle()
        assert not waiting.done()
        await rig.queue.trainer.release(rig.epoch, 1)
        assert await waiting == [5]
        with pytest.raises(Conflict, match="only 1 taken"):
            await rig.queue.trainer.release(rig.epoch, 2)

    rigged(tmp_path, scenario)


def test_a_drop_frees_its_slot_at_once_and_its_place_in_the_order(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, max_lag=0))
        first, second = await rig.admit(2)
        await rig.put("second", ticket=second)
        taking = asyncio.create_task(rig.take(1, wait_s=5))
        await settle()
        assert not taking.done()
        await rig.queue.environments.drop(rig.environments["a"], first, "no_signal")
        assert names(await taking) == ["second"]
        assert await rig.admit() == [3]
        with pytest.raises(Conflict, match="not being played"):
            await rig.queue.environments.drop(rig.environments["a"], first, "no_signal")
        with pytest.raises(Conflict, match="not being played"):
            await rig.put(ticket=second)

    rigged(tmp_path, scenario)


def test_slots_go_to_those_who_asked_first_and_whoever_left_gets_none(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, groups_per_step=1, max_lag=0))
        (ticket,) = await rig.admit()
        leaving, patient = (asyncio.create_task(rig.admit(wait_s=5)) for _ in range(2))
        await settle()
        leaving.cancel()
        await settle()
        await rig.queue.environments.drop(rig.environments["a"], ticket, "done")
        assert await patient == [ticket + 1]

    rigged(tmp_path, scenario)


def test_too_many_drops_in_a_row_starve_the_trainer_until_a_group_comes(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, max_dropped=3))
        for _ in range(3):
            await rig.queue.environments.drop(rig.environments["a"], (await rig.admit())[0], "no_signal")
        with pytest.raises(Starved, match=r"3 groups in a row .* 3 no_signal"):
            await rig.take(1)
        await rig.put("good")
        assert names(await rig.take(1)) == ["good"]

    rigged(tmp_path, scenario)


def test_what_can_never_be_served_is_refused(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        for options in ({"count": 5}, {"count": 0}, {"count": 1, "sequences": 1}, {"sequences": 8}):
            with pytest.raises(GroupRefused):
                await rig.queue.trainer.take(rig.epoch, options.pop("count", 0), **options)

    rigged(tmp_path, scenario)


# --- versions


def test_what_is_older_than_the_bound_is_never_handed_out_and_is_counted(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        for version in (0, 1, 2, 3, 0):
            await rig.put(str(version), version)
            await rig.queue.trainer.announce_version(rig.epoch, min(version, 1) or rig.queue.version)
        await rig.queue.trainer.announce_version(rig.epoch, 3)
        lease = await rig.take(2)
        assert lease is not None
        assert (names(lease), [each.lag for each in lease.groups]) == (["2", "3"], [1, 0])
        assert await rig.take(1) is None
        assert (await rig.put("old", 1)).outcome == "stale"
        await settle()
        status = rig.queue.status()
        assert status["dropped"] == {"stale": 4}
        assert status["taken_lag"] == {"0": 1, "1": 1}
        await rig.restart()
        assert rig.queue.queued == 0

    rigged(tmp_path, scenario)


def test_what_became_too_old_in_a_line_takes_nobody_s_room(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        for _ in range(9):
            await rig.put()
        await rig.queue.trainer.announce_version(rig.epoch, 2)
        assert rig.queue.queued == 4  # those that hold slots are dropped when they are looked at
        await rig.queue.environments.put([group(2, environment=rig.environments["a"]) for _ in range(5)])

    rigged(tmp_path, scenario, max_queued=9)


def test_the_oldest_token_counts_and_recorded_data_is_never_old(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        await rig.queue.trainer.announce_version(rig.epoch, 9)
        mixed = codec.decode(group(9).frame)
        mixed[1].versions = [-1, 9, 7, 9]
        recorded = codec.decode(group(0).frame)
        for each in recorded:
            each.versions, each.status = [-1] * 4, "recorded"
        put = await rig.queue.environments.put(
            [codec.encode(mixed), codec.encode(recorded)], environment=rig.environments["a"]
        )
        assert [each.outcome for each in put] == ["stale", "queued"]
        lease = await rig.take(1)
        assert lease is not None
        assert lease.groups[0].lag == 0

    rigged(tmp_path, scenario)


def test_a_version_does_not_go_back_within_a_registration(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        await rig.queue.trainer.announce_version(rig.epoch, 5)
        await rig.queue.trainer.announce_version(rig.epoch, 5)
        with pytest.raises(Conflict, match="announced version 5 before"):
            await rig.queue.trainer.announce_version(rig.epoch, 4)
        await rig.begin(dataclasses.replace(RUN, version=3))  # from a checkpoint
        assert rig.queue.version == 3

    rigged(tmp_path, scenario)


# --- leases


def test_a_lease_that_is_not_acknowledged_returns_in_the_old_order_and_an_acknowledged_one_never(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, lease_s=30))
        for name in "abcd":
            await rig.put(name)
        first, second = await rig.take(2), await rig.take(1)
        assert first is not None
        assert second is not None
        rig.now += 20
        assert await rig.queue.trainer.renew(rig.epoch, second.id) == 30
        rig.now += 15
        await rig.queue.core.tick()
        with pytest.raises(NotKnown, match="lapsed"):
            await rig.queue.trainer.renew(rig.epoch, first.id)
        assert names(await rig.take(2)) == ["a", "b"]
        assert await rig.queue.trainer.ack(rig.epoch, [second.id]) == 1
        assert await rig.queue.trainer.ack(rig.epoch, [second.id]) == 0
        for lapsed_or_none in (first.id, 77):
            with pytest.raises(NotKnown, match="lapsed"):
                await rig.queue.trainer.ack(rig.epoch, [second.id, lapsed_or_none])
        rig.now += 100
        await rig.queue.core.tick()
        assert names(await rig.take(3)) == ["a", "b", "d"]
        assert rig.queue.status()["queue"]["held"] == 4  # c's slot is not released

    rigged(tmp_path, scenario)


def test_a_later_registration_fences_the_earlier_and_gets_its_groups_at_once(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        for name in "ab":
            await rig.put(name)
        lease = await rig.take(2)
        old = rig.epoch
        assert lease is not None
        await rig.begin()
        trainer = rig.queue.trainer
        for call in (
            trainer.take(old, 1), trainer.ack(old, [lease.id]), trainer.renew(old, lease.id),
            trainer.release(old, 1), trainer.announce_version(old, 7),
        ):  # fmt: skip
            with pytest.raises(Fenced):
                await call
        # Its checkpoint holds `a`, and the acknowledgement did not arrive: it says so by the group's id.
        assert await rig.queue.trainer.ack(rig.epoch, groups=[lease.groups[0].id]) == 1
        assert names(await rig.take(1)) == ["b"]

    rigged(tmp_path, scenario)


def test_what_a_trainer_that_goes_back_has_never_made_is_not_trained_on(tmp_path: Path):
    """It resumes from a checkpoint of version 3, or begins again: what version 5 played is of another past."""

    async def scenario(rig: Rig) -> None:
        await rig.begin()
        await rig.queue.trainer.announce_version(rig.epoch, 4)
        (early,), (late,) = await rig.admit(by="a"), await rig.admit(by="a")
        await rig.put("kept", version=3, ticket=early)
        await rig.queue.trainer.announce_version(rig.epoch, 5)
        await rig.put("in line", version=5)
        await rig.restart()
        rig.epoch = (await rig.queue.registration.register_trainer(dataclasses.replace(RUN, version=3))).epoch
        with pytest.raises(Conflict):
            await rig.put("late", version=5, ticket=late)
        assert rig.queue.queued == 1
        assert names(await rig.take(1)) == ["kept"]
        assert rig.queue.status()["dropped"] == {"undone": 2}

    rigged(tmp_path, scenario)


def test_another_run_is_refused_unless_it_begins_afresh(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        await rig.put("left over")
        other = dataclasses.replace(RUN, run_id="other")
        with pytest.raises(Conflict, match="run 'run'"):
            await rig.queue.registration.register_trainer(other)
        rig.epoch = (await rig.queue.registration.register_trainer(other, fresh=True)).epoch
        assert rig.queue.queued == 0
        with pytest.raises(NotKnown):
            await rig.put("by an environment of the run before")
        await rig.restart()
        assert (rig.queue.queued, rig.queue.trainer_spec) == (0, other)

    rigged(tmp_path, scenario)


def test_a_trainer_that_holds_groups_or_waits_for_them_refuses_another_run(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, lease_s=30))
        other = dataclasses.replace(RUN, run_id="other")
        waiting = asyncio.create_task(rig.take(1, wait_s=5))
        await settle()
        for _ in range(2):
            with pytest.raises(Conflict, match=r"run 'run' is registered and"):
                await rig.queue.registration.register_trainer(other, fresh=True)
            await rig.put("x")
            await waiting
        rig.epoch = (await rig.queue.registration.register_trainer(dataclasses.replace(RUN, lease_s=30))).epoch
        assert names(await rig.take(1)) == ["x"]
        rig.now += 31
        await rig.queue.registration.register_trainer(other, fresh=True)
        assert rig.queue.status()["dropped"] == {"other_run": 2}

    rigged(tmp_path, scenario)


# --- environments


async def _served(rig: Rig, rounds: int, *, free: bool) -> Counter[str]:
    """What batches are made of while every environment has more than is wanted of it."""
    taken: Counter[str] = Counter()
    by_id = {id: name for name, id in rig.environments.items()}

    async def play(name: str) -> None:
        while True:
            for ticket in await rig.admit(by=name, wait_s=5):
                await rig.put(by=name, ticket=ticket)

    playing = [] if free else [asyncio.create_task(play(name)) for name in rig.environments for _ in range(4)]
    if free:
        for name in rig.environments:
            made = [group(environment=rig.environments[name]) for _ in range(2 * rounds)]
            await rig.queue.environments.put(made)
    for _ in range(rounds):
        lease = await rig.take(2, wait_s=5)
        assert lease is not None
        taken.update(by_id[each.environment] for each in lease.groups)
        await rig.queue.trainer.ack(rig.epoch, [lease.id])
        await rig.queue.trainer.release(rig.epoch, 2)
    for task in playing:
        task.cancel()
    await asyncio.gather(*playing, return_exceptions=True)
    return taken


@pytest.mark.parametrize("free", [False, True], ids=["tickets", "lines"])
def test_weights_shape_batches(tmp_path: Path, free: bool):
    async def scenario(rig: Rig) -> None:
        await rig.begin(a={"weight": 3.0}, b={"weight": 1.0})
        taken = await _served(rig, 30, free=free)
        assert taken["a"] == pytest.approx(45, abs=3)

    rigged(tmp_path, scenario)


def test_a_minimum_share_holds_whatever_the_weights(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(a={"weight": 100.0}, b={"min_share": 0.25}, c={})
        taken = await _served(rig, 30, free=True)
        assert taken["b"] == pytest.approx(15, abs=2)
        assert taken["a"] > 40
        with pytest.raises(Conflict, match=r"would be 1\.05"):
            await rig.queue.registration.register_environment(RegisteredEnvironment("d", min_share=0.8))

    rigged(tmp_path, scenario)


def test_a_silent_environment_s_tickets_and_share_go_to_the_others_until_it_speaks(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(a={"min_share": 0.9, "lapse_s": 10}, b={})
        tickets = await rig.admit(4)
        for name in "xy":
            await rig.put(name, by="b")
        assert await rig.take(1) is None
        rig.now += 11
        rig.queue.environments.heartbeat(rig.environments["b"])
        await rig.queue.core.tick()
        assert names(await rig.take(2)) == ["x", "y"]
        shares = {each["name"]: each["share"] for each in rig.queue.status()["environments"]}
        assert shares == {"a_0": 0, "b_0": 1}
        with pytest.raises(Conflict, match="lapsed"):
            await rig.put(ticket=tickets[0])
        shares = {each["name"]: each["share"] for each in rig.queue.status()["environments"]}
        assert shares == {"a_0": pytest.approx(0.9), "b_0": pytest.approx(0.1)}
        assert rig.queue.status()["dropped"] == {"lapsed": 4}

    rigged(tmp_path, scenario)


def test_a_disconnected_environment_s_groups_stay_and_its_tickets_go(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(a={}, b={})
        await rig.admit()
        await rig.put("stays", by="b")
        await rig.queue.registration.disconnect(rig.environments["b"])
        with pytest.raises(NotKnown, match="register it again"):
            await rig.put(by="b")
        await rig.queue.registration.disconnect(rig.environments["a"])
        assert names(await rig.take(1)) == ["stays"]

    rigged(tmp_path, scenario)


def test_a_ticket_that_is_played_for_too_long_does_not_hold_up_the_rest(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        await rig.admit()
        await rig.put("free")
        rig.now += 61
        rig.queue.environments.heartbeat(rig.environments["a"])
        await rig.queue.core.tick()
        assert names(await rig.take(1)) == ["free"]
        assert rig.queue.status()["dropped"] == {"overdue": 1}

    rigged(tmp_path, scenario, max_play_s=60)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": "../x"}, GroupRefused), ({"weight": 0.0}, GroupRefused), ({"weight": float("nan")}, GroupRefused),
        ({"min_share": 1.5}, GroupRefused), ({"group_size": -1}, GroupRefused), ({"lapse_s": 0.0}, GroupRefused),
        ({"tokenizer": "other"}, GroupRefused),
    ],
)  # fmt: skip
def test_an_environment_that_does_not_fit_is_refused(tmp_path: Path, options: dict[str, Any], error: type[Exception]):
    async def scenario(rig: Rig) -> None:
        with pytest.raises(Conflict, match="no trainer"):
            await rig.queue.registration.register_environment(RegisteredEnvironment("a"))
        await rig.begin(dataclasses.replace(RUN, tokenizer="this"))
        with pytest.raises(error):
            await rig.queue.registration.register_environment(RegisteredEnvironment(**({"name": "a"} | options)))

    rigged(tmp_path, scenario)


# --- groups


def test_a_group_is_held_to_what_trainer_and_environment_said(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, num_ids=5, max_tokens=6), a={"group_size": 2, "max_tokens": 5})
        for field, options in {
            "groups.0.trajectories.0.ids": {"tokens": 6},
            "groups.0.trajectories": {"size": 3},
        }.items():
            with pytest.raises(GroupRefused) as refused:
                await rig.put(**options)
            assert refused.value.field == field
        bad = codec.decode(group().frame)
        bad[1].ids[2] = 5
        with pytest.raises(GroupRefused, match="id 5, but the model has 5"):
            await rig.queue.environments.put([group(), codec.encode(bad)], environment=rig.environments["a"])
        assert rig.queue.queued == 0
        await rig.put()
        assert rig.queue.queued == 1

    rigged(tmp_path, scenario)


def test_a_post_is_stored_whole_or_not_at_all(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        (ticket,) = await rig.admit()
        a = rig.environments["a"]
        with pytest.raises(GroupRefused, match="twice"):
            await rig.queue.environments.put([group(environment=a, ticket=ticket), group(environment=a, ticket=ticket)])
        with pytest.raises(NotKnown):
            await rig.queue.environments.put([group(environment=a), group(environment=99)])
        assert rig.queue.queued == 0
        await rig.put(ticket=ticket)

    rigged(tmp_path, scenario)


def test_a_full_queue_says_so_and_takes_groups_again_when_there_is_room(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        (ticket,) = await rig.admit()
        for _ in range(3):
            await rig.put()
        with pytest.raises(QueueFull, match="3 groups are queued"):
            await rig.put()
        await rig.put(ticket=ticket)  # its place is bounded by slots
        assert await rig.take(2) is not None
        await rig.put()

    rigged(tmp_path, scenario, max_queued=3)


def test_a_full_disk_changes_nothing_and_the_queue_goes_on(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        (ticket,) = await rig.admit()
        rig.queue.core.segments.reserve_bytes = 2**60
        for options in ({}, {"ticket": ticket}):
            with pytest.raises(StoreFull):
                await rig.put(**options, once=RequestKey(f"k{len(options)}", b""))
        rig.queue.core.segments.reserve_bytes = 0
        assert rig.queue.queued == 0
        await rig.put("late", ticket=ticket, once=RequestKey("k1", b""))
        assert names(await rig.take(1)) == ["late"]

    rigged(tmp_path, scenario)


def test_a_payload_that_the_disk_spoiled_is_dropped_and_the_next_one_taken(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        for name in "ab":
            await rig.put(name)
        (file,) = (tmp_path / "segments").glob("*.seg")
        content = bytearray(file.read_bytes())
        content[40] ^= 1
        file.write_bytes(content)
        assert names(await rig.take(1)) == ["b"]
        assert rig.queue.status()["dropped"] == {"damaged": 1}

    rigged(tmp_path, scenario)


# --- batches of sequences


def test_a_batch_holds_exactly_so_many_sequences_of_groups_of_any_size(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(SEQUENCES)
        for name, size in {"a": 3, "b": 3, "c": 3, "d": 2, "e": 8}.items():
            await rig.put(name, size=size)
        first = await rig.take(sequences=8)
        assert first is not None
        assert (names(first), first.sequences) == (["a", "b", "d"], 8)
        assert names(await rig.take(sequences=8)) == ["e"]
        assert await rig.take(sequences=8) is None
        assert rig.queue.queued == 1
        with pytest.raises(GroupRefused, match="never fit"):
            await rig.put(size=9)

    rigged(tmp_path, scenario)


def test_weights_shape_batches_of_sequences_too(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(SEQUENCES, a={"weight": 3.0}, b={})
        for name in "ab":
            await rig.queue.environments.put([group(environment=rig.environments[name]) for _ in range(40)])
        taken: Counter[int] = Counter()
        for _ in range(10):
            lease = await rig.take(sequences=8)
            assert lease is not None
            taken.update(each.environment for each in lease.groups)
        assert taken[rig.environments["a"]] == pytest.approx(30, abs=2)

    rigged(tmp_path, scenario)
