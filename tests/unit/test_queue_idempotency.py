"""The rollout queue under repeated calls and restarts: equal replies, and nothing lost."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from queue_rig import RUN, Rig, group, names, rigged

from tandem.errors import Conflict, KeyReused, StoreOwned
from tandem.io.request_key import RequestKey
from tandem.rollout.queue.queue import RolloutQueue
from tandem.rollout.queue.types import RegisteredEnvironment


def test_the_same_key_gets_the_same_answer_at_once_later_and_after_a_restart(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, groups_per_step=4))
        a = rig.environments["a"]
        spec = RegisteredEnvironment("b")
        for restart in (False, True):
            if restart:
                await rig.restart()
            both = [
                await asyncio.gather(
                    rig.admit(2, once=RequestKey("admit", b"1")), rig.admit(2, once=RequestKey("admit", b"1"))
                ),
                await asyncio.gather(
                    rig.put("x", once=RequestKey("put", b"1")), rig.put("x", once=RequestKey("put", b"1"))
                ),
                [
                    await rig.queue.registration.register_environment(spec, once=RequestKey("registration", b"1"))
                    for _ in range(2)
                ],
            ]
            assert [one for one, other in both if one != other] == []
            if not restart:
                first = both
        assert both == first
        assert rig.queue.queued == 1
        tickets = first[0][0]
        for _ in range(2):
            await rig.queue.environments.drop(a, tickets[0], "no_signal", once=RequestKey("drop", b"1"))
            await rig.put("y", ticket=tickets[1], once=RequestKey("ticket", b"1"))
        for _ in range(2):
            assert names(await rig.take(1, once=RequestKey("take", b"1"))) == ["y"]
        lease = await rig.take(1, once=RequestKey("take", b"1"))
        assert lease is not None
        for _ in range(2):
            assert await rig.queue.trainer.ack(rig.epoch, [lease.id], once=RequestKey("ack", b"1")) == 1
            assert await rig.queue.trainer.ack(rig.epoch, [lease.id]) == 0
            await rig.queue.trainer.release(rig.epoch, 1, once=RequestKey("release", b"1"))
        assert rig.queue.status()["queue"]["held"] == 1
        with pytest.raises(Conflict, match="which has ended"):
            await rig.take(1, once=RequestKey("take", b"1"))

    rigged(tmp_path, scenario)


def test_the_same_key_for_something_else_is_refused(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        await rig.put(once=RequestKey("k", b"1"))
        with pytest.raises(KeyReused, match="'k'"):
            await rig.put(once=RequestKey("k", b"2"))
        assert rig.queue.queued == 1

    rigged(tmp_path, scenario)


def test_the_key_of_a_version_that_changes_nothing_is_refused_for_another(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        await rig.queue.trainer.announce_version(rig.epoch, 1)
        for _ in range(2):
            await rig.queue.trainer.announce_version(rig.epoch, 1, once=RequestKey("k", b"1"))
        with pytest.raises(KeyReused, match="'k'"):
            await rig.queue.trainer.announce_version(rig.epoch, 2, once=RequestKey("k", b"2"))
        assert rig.queue.version == 1

    rigged(tmp_path, scenario)


def test_a_release_that_comes_again_after_a_later_version_is_answered_as_before(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        await rig.put()
        await rig.take(1, version=0)
        await rig.queue.trainer.release(rig.epoch, 1, version=1, once=RequestKey("release", b"1"))
        await rig.queue.trainer.announce_version(rig.epoch, 2)
        await rig.queue.trainer.release(rig.epoch, 1, version=1, once=RequestKey("release", b"1"))
        assert rig.queue.version == 2

    rigged(tmp_path, scenario)


def test_a_key_that_failed_may_come_again(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        with pytest.raises(Conflict):
            await rig.put(ticket=77, once=RequestKey("k", b"1"))
        await rig.put(once=RequestKey("k", b"2"))
        assert await rig.take(1, once=RequestKey("t", b"")) is not None
        assert await rig.take(1, once=RequestKey("u", b"")) is None  # nothing was decided, so nothing is remembered
        await rig.put("late")
        assert names(await rig.take(1, once=RequestKey("u", b""))) == ["late"]

    rigged(tmp_path, scenario)


def test_a_key_is_forgotten_after_its_time(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        await rig.put(once=RequestKey("short", b"1", keep_s=0.01))
        await asyncio.sleep(0.02)
        await rig.put(once=RequestKey("short", b"1", keep_s=0.01))
        assert rig.queue.queued == 2

    rigged(tmp_path, scenario)


def test_a_client_that_left_gets_its_ticket_and_its_batch_by_asking_again(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        leaving = asyncio.create_task(rig.admit(once=RequestKey("k", b"1")))
        while not rig.queue.core.state.playing:  # it is decided, and not written
            await asyncio.sleep(0)
        leaving.cancel()
        (ticket,) = await rig.admit(once=RequestKey("k", b"1"))
        assert rig.queue.status()["queue"]["playing"] == 1
        await rig.put("x", ticket=ticket)
        leaving = asyncio.create_task(rig.take(1, once=RequestKey("t", b"1")))
        while not rig.queue.core.state.leases:
            await asyncio.sleep(0)
        leaving.cancel()
        assert names(await rig.take(1, once=RequestKey("t", b"1"))) == ["x"]
        assert rig.queue.status()["queue"]["leases"] == 1

    rigged(tmp_path, scenario)


def test_everything_is_as_it_was_after_a_restart(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, groups_per_step=4, max_lag=1), a={"weight": 2.0}, b={})
        played, waiting, dropped = await rig.admit(3)
        await rig.put("ticket", ticket=played)
        await rig.queue.environments.drop(rig.environments["a"], dropped, "no_signal")
        for name in "xyz":
            await rig.put(name, by="b")
        lease = await rig.take(1)
        assert lease is not None
        await rig.queue.trainer.announce_version(rig.epoch, 1)
        before = rig.queue.status()
        await rig.restart()
        assert await rig.take(8) is None  # the first call of all lets in what waits in lines
        after = rig.queue.status()
        assert after["trainer"] == before["trainer"]
        for key in ("queued", "playing", "held", "leases", "leased", "slots"):
            assert after["queue"][key] == before["queue"][key], key
        seats = [(e["name"], e["weight"], e["share"], e["counts"], e["playing"]) for e in after["environments"]]
        assert seats == [
            (e["name"], e["weight"], e["share"], e["counts"], e["playing"]) for e in before["environments"]
        ]
        await rig.put("late", ticket=waiting)
        assert await rig.queue.trainer.ack(rig.epoch, [lease.id]) == 1
        await rig.queue.trainer.release(rig.epoch, 1)
        assert names(await rig.take(4)) == ["late", "x", "y", "z"]
        fresh = await rig.admit()
        assert fresh > [waiting]

    rigged(tmp_path, scenario)


def test_slots_of_acknowledged_groups_are_held_over_a_restart(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, groups_per_step=1))
        for name in "xyz":
            await rig.put(name)
        first, second = await rig.take(1), await rig.take(1)
        assert first is not None
        assert second is not None
        await rig.queue.trainer.ack(rig.epoch, [second.id])
        await rig.restart()
        assert await rig.take(1) is None
        assert await rig.queue.trainer.ack(rig.epoch, [second.id]) == 0
        await rig.queue.trainer.release(rig.epoch, 2)
        assert names(await rig.take(1)) == ["z"]

    rigged(tmp_path, scenario)


def test_a_lease_outlives_a_restart_for_its_whole_time_and_no_longer(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, lease_s=30))
        await rig.put("x")
        assert await rig.take(1) is not None
        await rig.restart()
        assert await rig.take(1) is None
        rig.now += 31
        await rig.queue.core.tick()
        assert names(await rig.take(1)) == ["x"]

    rigged(tmp_path, scenario)


def test_a_second_server_on_the_same_directory_is_refused(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        with pytest.raises(StoreOwned):
            RolloutQueue(tmp_path)

    rigged(tmp_path, scenario)


def test_what_was_refused_is_kept_with_its_reason_up_to_a_bound(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        for number in range(5):
            await rig.queue.environments.quarantine(rig.environments["a"], f"groups.{number}.ids", "bad", b"x" * 100)
        kept = rig.queue.quarantined()
        assert [(each["field"], each["bytes"]) for each in kept] == [("groups.4.ids", 10), ("groups.3.ids", 10)]
        assert rig.queue.status()["environments"][0]["counts"] == {"refused": 5}

    rigged(tmp_path, scenario, quarantine_rows=2, quarantine_bytes=10)


def test_files_go_when_their_groups_are_trained_on_and_ids_are_never_used_twice(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, groups_per_step=50))
        rig.queue.core.segments.roll_bytes = 1000
        await rig.queue.environments.put([group(environment=rig.environments["a"]) for _ in range(50)])
        many = rig.queue.status()["stored"]["bytes"]
        lease = await rig.take(50)
        assert lease is not None
        await rig.queue.trainer.ack(rig.epoch, [lease.id])
        for _ in range(2):  # a file is removed by the thread that writes, after it wrote
            await rig.put()
        assert rig.queue.status()["stored"]["bytes"] < many / 5
        top = lease.groups[-1].id
        lease = await rig.take(1)
        assert lease is not None
        await rig.queue.trainer.ack(rig.epoch, [lease.id])
        await rig.restart()
        assert (await rig.put()).id > top + 1

    rigged(tmp_path, scenario)
