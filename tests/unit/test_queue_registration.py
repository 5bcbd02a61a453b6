"""The rollout queue over several runs and versions: registrations, resets, and trainers that go back."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from queue_rig import RUN, Rig, group, names, rigged, settle

from tandem.errors import Conflict, GroupRefused, NotKnown, QueueFull
from tandem.io.request_key import RequestKey
from tandem.rollout.queue.state import EnvironmentState
from tandem.rollout.queue.types import RegisteredEnvironment


async def _another_run(rig: Rig, how: str) -> None:
    other = dataclasses.replace(RUN, run_id="other")
    if how == "reset":
        await rig.queue.registration.reset()
    rig.now += RUN.lease_s  # whatever was leased has lapsed
    rig.epoch = (await rig.queue.registration.register_trainer(other, fresh=how == "fresh")).epoch


@pytest.mark.parametrize("restart", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("how", ["fresh", "reset"])
def test_an_environment_of_a_run_before_is_nobody_in_the_next(tmp_path: Path, how: str, restart: bool):
    async def scenario(rig: Rig) -> None:
        await rig.begin(a={}, b={})
        old = dict(rig.environments)
        await rig.put("x", by="b")
        await rig.take(1)
        await rig.put("gone", by="b")
        await _another_run(rig, how)
        if restart:
            await rig.restart()
        handle = await rig.queue.registration.register_environment(RegisteredEnvironment("c"))
        assert handle.id not in old.values()
        for name in old:
            with pytest.raises(NotKnown, match="register it again"):
                await rig.put(by=name)
        (row,) = rig.queue.status()["environments"]
        assert (row["name"], row["counts"], row["taken"]) == ("c_0", {}, 0)
        await rig.restart()
        assert rig.queue.environment_status(handle.id)["counts"] == {}

    rigged(tmp_path, scenario)


def test_the_key_of_an_environment_s_registration_in_a_run_before_registers_it_in_this_one(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        spec, once = RegisteredEnvironment("b"), RequestKey("registration", b"1")
        before = await rig.queue.registration.register_environment(spec, once=once)
        assert await rig.queue.registration.register_environment(spec, once=once) == before
        await _another_run(rig, "fresh")
        for _ in range(2):
            handle = await rig.queue.registration.register_environment(spec, once=once)
            assert handle.id == before.id + 1
            await rig.restart()
        rig.queue.environments.heartbeat(handle.id)

    rigged(tmp_path, scenario)


def test_an_environment_that_left_is_forgotten_with_its_last_group_and_its_number_is_not_given_again(
    tmp_path: Path,
):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        await rig.put("x")
        for _ in range(20):  # a worker that is started again and again
            handle = await rig.queue.registration.register_environment(RegisteredEnvironment("w"))
            await rig.queue.registration.disconnect(handle.id)
        await rig.queue.registration.disconnect(rig.environments["a"])
        rig.now += 10
        await rig.queue.core.tick()
        assert [row["name"] for row in rig.queue.status()["environments"]] == ["a_0"]
        lease = await rig.take(1)
        assert lease is not None
        await rig.queue.trainer.ack(rig.epoch, [lease.id])
        rig.now += 10
        await rig.queue.core.tick()
        await rig.restart()
        assert rig.queue.status()["environments"] == []
        again = await rig.queue.registration.register_environment(RegisteredEnvironment("w"))
        assert (again.id, again.name) == (handle.id + 1, "w_0")

    rigged(tmp_path, scenario)


def test_a_newcomer_s_name_is_its_own_when_one_before_it_was_forgotten(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(a={})
        second = await rig.queue.registration.register_environment(RegisteredEnvironment("a"))
        await rig.queue.registration.disconnect(rig.environments["a"])
        rig.now += 10
        await rig.queue.core.tick()
        third = await rig.queue.registration.register_environment(RegisteredEnvironment("a"))
        assert (second.name, third.name) == ("a_1", "a_0")

    rigged(tmp_path, scenario)


def test_status_counts_once_however_many_environments_there_are(tmp_path: Path):
    """A number of looks, not seconds: ten times the environments cost no more looks at groups."""
    looks = 0

    class Counting(dict[int, Any]):
        def values(self) -> Any:
            nonlocal looks
            looks += 1
            return super().values()

    async def scenario(rig: Rig) -> None:
        await rig.begin(**{f"e{k}": {} for k in range(20)})
        (ticket,) = await rig.admit(by="e3")
        for k in range(3):
            await rig.put(by="e1", size=k + 1)
        state = rig.queue.core.state
        state.in_flight, state.playing = Counting(state.in_flight), Counting(state.playing)
        rows = {row["name"]: row for row in rig.queue.status()["environments"]}
        assert looks <= 4
        row = rows["e1_0"]
        assert (row["queued"], row["sequences"], row["largest"], row["playing"]) == (3, 6, 3, 0)
        assert rows["e3_0"]["playing"] == ticket
        assert rows["e0_0"]["queued"] == 0

    rigged(tmp_path, scenario)


@pytest.mark.parametrize("what", ["they all live", "a quarter falls silent", "all have a minimum"])
def test_twice_the_environments_cost_a_tick_and_a_sharing_twice_the_calls(tmp_path: Path, what: str):
    """A number of calls, not seconds: work that goes up with the square would be four times as much."""

    async def work(rig: Rig, environments: int) -> int:
        await rig.begin()
        state = rig.queue.core.state
        for id in range(2, environments + 1):
            minimum = 1 / 2 / environments if what == "all have a minimum" else 0.0
            spec = RegisteredEnvironment(f"e{id}", weight=float(1 + id), min_share=minimum)
            state.environments[id] = EnvironmentState(id, f"e{id}_0", spec, rig.now)
        await rig.admit(3)
        rig.now += 301 if what == "a quarter falls silent" else 1
        for id in range(1 + environments // 4, environments + 1):
            rig.queue.environments.heartbeat(id)

        def share() -> None:
            state.update_shares()
            with pytest.raises(StopIteration):
                rig.queue.core.tick().send(None)

        calls = _calls(share)
        assert sum(each.silent for each in state.environments.values()) == (
            environments // 4 if what == "a quarter falls silent" else 0
        )
        assert sum(each.share for each in state.environments.values()) == pytest.approx(1)
        return calls

    counted: list[int] = []
    for number in (200, 400):

        async def scenario(rig: Rig, number: int = number) -> None:
            counted.append(await work(rig, number))

        rigged(tmp_path / str(number), scenario)
    assert counted[1] < 2.5 * counted[0]


def _calls(work: Callable[[], None]) -> int:
    """How many functions were called, or generators gone on with, in all."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


# --- a trainer that goes back


def test_what_a_trainer_that_went_back_has_never_made_does_not_return_after_a_kill(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, version=57))
        await rig.put("held", version=57)
        await rig.take(1)
        await rig.put("waiting", version=57)
        rig.queue.core.calls.write_later = lambda change, then=None: None  # the kill: background writes are lost
        await rig.begin(dataclasses.replace(RUN, version=50), b={})
        assert (rig.queue.queued, rig.queue.status()["dropped"]) == (0, {"undone": 2})
        await rig.restart()
        assert rig.queue.queued == 0
        assert rig.queue.environment_status(rig.environments["a"])["counts"] == {"put": 2, "undone": 2}

    rigged(tmp_path, scenario)


def test_what_is_on_its_way_to_the_disk_when_a_trainer_goes_back_is_asked_when_it_arrives(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, version=5))
        (ticket,) = await rig.admit()
        async with asyncio.TaskGroup() as both:
            both.create_task(rig.queue.registration.register_trainer(dataclasses.replace(RUN, version=4)))
            both.create_task(rig.put("free", version=5))
            admitting = both.create_task(rig.admit())
        assert rig.queue.queued == 0
        await settle()
        await rig.restart()
        assert rig.queue.queued == 0
        for each in (ticket, *admitting.result()):
            if each == ticket:
                with pytest.raises(Conflict):
                    await rig.put("late", version=5, ticket=each)

    rigged(tmp_path, scenario)


def test_a_ticketed_group_that_was_being_written_when_a_trainer_went_back_is_not_trained_on(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, version=5))
        tickets = await rig.admit(2)
        async with asyncio.TaskGroup() as both:
            both.create_task(rig.put("new", version=5, ticket=tickets[0]))
            both.create_task(rig.put("old", version=4, ticket=tickets[1]))
            both.create_task(rig.queue.registration.register_trainer(dataclasses.replace(RUN, version=4)))
        rig.epoch = rig.queue.epoch
        assert names(await rig.take(1)) == ["old"]
        assert rig.queue.queued == 0
        assert rig.queue.status()["dropped"] == {"undone": 1}

    rigged(tmp_path, scenario)


def test_a_post_from_further_ahead_than_any_engine_can_be_is_dropped(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin(dataclasses.replace(RUN, max_lag=2, version=10))
        assert [(await rig.put(version=version)).outcome for version in (12, 13, 14, 57)] == [
            "queued", "queued", "undone", "undone",
        ]  # fmt: skip
        assert rig.queue.environment_status(rig.environments["a"])["counts"] == {"put": 2, "undone": 2}

    rigged(tmp_path, scenario)


@pytest.mark.parametrize("sequences", [False, True], ids=["groups", "sequences"])
def test_what_is_newer_than_the_trainer_says_it_is_at_that_take_is_dropped_when_its_turn_comes(
    tmp_path: Path, sequences: bool
):
    async def scenario(rig: Rig) -> None:
        options = {"groups_per_step": 0, "sequences_per_step": 2, "max_lag": -1} if sequences else {}
        await rig.begin(dataclasses.replace(RUN, version=3, **options))
        for name, version in (("ahead", 4), ("now", 3), ("silent", 4)):
            await rig.put(name, version=version)
        batch = {"sequences": 2} if sequences else {"count": 1}
        assert names(await rig.take(**batch, version=3)) == ["now"]
        assert names(await rig.take(**batch)) == ["silent"]  # who does not say where it is may be there by now
        assert rig.queue.status()["dropped"] == {"undone": 1}
        await rig.put("honest", version=4)
        assert names(await rig.take(**batch, version=4)) == ["honest"]

    rigged(tmp_path, scenario)


# --- refusals


def test_slots_without_bound_are_refused_where_batches_are_counted_in_groups(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        with pytest.raises(GroupRefused, match="set 0 or above") as refused:
            await rig.queue.registration.register_trainer(dataclasses.replace(RUN, max_lag=-1))
        assert refused.value.field == "max_lag"

    rigged(tmp_path, scenario)


def test_refusals_name_the_field_of_the_body_and_the_value(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        with pytest.raises(GroupRefused, match=r"'\.\./x'"):
            await rig.queue.registration.register_trainer(dataclasses.replace(RUN, run_id="../x"))
        await rig.begin()
        for count in (0, 5):
            with pytest.raises(GroupRefused) as refused:
                await rig.take(count)
            assert refused.value.field == "groups"

    rigged(tmp_path, scenario)


def test_nothing_is_listed_where_nothing_was_asked_for(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        ids = [(await rig.put()).id for _ in range(3)]
        await rig.admit()
        assert [rig.queue.groups(most) for most in (0, 2, 9)] == [[], ids[1:], ids]

    rigged(tmp_path, scenario)


def test_posts_at_once_do_not_queue_more_than_the_most(tmp_path: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        made = [group(environment=rig.environments["a"]) for _ in range(3)]
        put = await asyncio.gather(*(rig.queue.environments.put(made) for _ in range(5)), return_exceptions=True)
        assert sum(isinstance(each, QueueFull) for each in put) == 4
        assert rig.queue.queued == 3
        await rig.put()

    rigged(tmp_path, scenario, max_queued=5)
