"""The in-memory store: slots, the order of groups, and every misuse of a ticket."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.errors import ProducerDied, Starved, StoreError, StoreTimeout
from tandem.rollout.store import MemoryStore
from tandem.types import Group, Ticket, Trajectory


def group(name: object) -> Group:
    return [Trajectory([1], [True], [0.0], [0], task_id=str(name))]


def names(groups: list[Group]) -> list[str]:
    return [siblings[0].task_id for siblings in groups]


def inside(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 5))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_groups_are_handed_out_in_the_order_in_which_they_started():
    async def scenario() -> None:
        store = MemoryStore(4)
        tickets = [await store.admit() for _ in range(4)]
        taking = asyncio.create_task(store.take(2))
        for ticket in (tickets[3], tickets[1], tickets[2]):
            await store.put(ticket, group(ticket.order))
            await settle()
            assert not taking.done()  # three have finished, but the oldest has not
        await store.put(tickets[0], group(0))
        assert names(await taking) == ["0", "1"]
        assert names(await store.take(2)) == ["2", "3"]

    inside(scenario())


def test_a_slot_is_held_from_admit_to_release_and_not_only_to_take():
    async def scenario() -> None:
        store = MemoryStore(2)
        for order in range(2):
            await store.put(await store.admit(), group(order))
        await store.take(2)
        waiting = asyncio.create_task(store.admit())
        await settle()
        assert not waiting.done()
        await store.release(1)
        assert (await waiting).order == 2

    inside(scenario())


def test_a_drop_frees_its_slot_at_once_and_its_place_in_the_order():
    async def scenario() -> None:
        store = MemoryStore(2)
        first, second = await store.admit(), await store.admit()
        await store.put(second, group("second"))
        taking = asyncio.create_task(store.take(1))
        waiting = asyncio.create_task(store.admit())
        await settle()
        assert (taking.done(), waiting.done()) == (False, False)
        await store.drop(first, "no_signal")
        assert names(await taking) == ["second"]
        assert (await waiting).order == 2
        assert store.dropped == {"no_signal": 1}

    inside(scenario())


# --- who waits for a slot


def test_slots_go_to_those_who_asked_first():
    async def scenario() -> list[str]:
        store, admitted = MemoryStore(1), []
        ticket = await store.admit()

        async def ask(name: str) -> Ticket:
            mine = await store.admit()
            admitted.append(name)
            return mine

        asking = [asyncio.create_task(ask(name)) for name in "abc"]
        await settle()
        for task in asking:
            await store.drop(ticket, "done")
            ticket = await task
        return admitted

    assert inside(scenario()) == ["a", "b", "c"]


def test_a_newcomer_does_not_overtake_one_who_is_about_to_wake_up():
    async def scenario() -> None:
        store = MemoryStore(1)
        first = await store.admit()
        patient = asyncio.create_task(store.admit())
        await settle()
        await store.drop(first, "done")  # the slot is the patient one's, who has not run since
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await store.admit()
        assert (await patient).order == 1

    inside(scenario())


@pytest.mark.parametrize("when", ["while it waits", "after its slot came, before it woke"])
def test_a_cancelled_admit_loses_no_slot(when):
    async def scenario() -> None:
        store = MemoryStore(2)
        first, second = await store.admit(), await store.admit()
        leaving, staying = asyncio.create_task(store.admit()), asyncio.create_task(store.admit())
        await settle()
        if when == "while it waits":
            leaving.cancel()
            await settle()
            await store.drop(first, "done")
        else:
            await store.drop(first, "done")
            leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await store.put(second, group("second"))
        await store.put(await staying, group("staying"))
        assert names(await store.take(2)) == ["second", "staying"]
        await store.release(2)
        for _ in range(2):  # both slots are there again
            await store.admit()

    inside(scenario())


# --- what is refused


def test_a_ticket_is_good_for_one_group():
    async def scenario() -> None:
        store = MemoryStore(3)
        put, dropped, taken = [await store.admit() for _ in range(3)]
        await store.put(put, group("put"))
        await store.drop(dropped, "no_signal")
        for ticket in (put, dropped, Ticket(99)):
            with pytest.raises(StoreError, match=f"ticket {ticket.order} "):
                await store.put(ticket, group("again"))
            with pytest.raises(StoreError, match=f"ticket {ticket.order} "):
                await store.drop(ticket, "again")
        await store.put(taken, group("taken"))
        assert names(await store.take(2)) == ["put", "taken"]
        for ticket in (put, taken):
            with pytest.raises(StoreError):
                await store.put(ticket, group("again"))
            with pytest.raises(StoreError):
                await store.drop(ticket, "again")

    inside(scenario())


def test_an_empty_group_is_refused_and_its_ticket_stays_good():
    async def scenario() -> None:
        store = MemoryStore(1)
        ticket = await store.admit()
        with pytest.raises(StoreError, match="empty group"):
            await store.put(ticket, [])
        await store.put(ticket, group("full"))
        assert names(await store.take(1)) == ["full"]

    inside(scenario())


def test_no_more_is_released_than_was_taken():
    async def scenario() -> None:
        store = MemoryStore(2)
        await store.put(await store.admit(), group(0))
        with pytest.raises(StoreError, match=r"release\(1\), but only 0 taken"):
            await store.release(1)
        await store.take(1)
        with pytest.raises(StoreError, match=r"release\(2\), but only 1 taken"):
            await store.release(2)
        await store.release(1)

    inside(scenario())


def test_more_than_all_slots_can_never_be_taken():
    with pytest.raises(StoreError, match=r"take\(3\) can never succeed: there are only 2 slots"):
        inside(MemoryStore(2).take(3))


# --- how waiting ends


def test_too_many_drops_in_a_row_starve_whoever_waits():
    async def scenario() -> None:
        store = MemoryStore(2, max_dropped=3)
        taking = asyncio.create_task(store.take(1))
        for reason in ("no_signal", "hung", "no_signal"):
            await store.drop(await store.admit(), reason)
        with pytest.raises(Starved, match=r"3 groups in a row .*2 no_signal, 1 hung"):
            await taking
        with pytest.raises(Starved):
            await store.admit()

    inside(scenario())


def test_one_good_group_ends_the_row_of_drops():
    async def scenario() -> None:
        store = MemoryStore(2, max_dropped=3)
        for round_ in range(4):
            for _ in range(2):
                await store.drop(await store.admit(), "no_signal")
            await store.put(await store.admit(), group(round_))
            assert names(await store.take(1)) == [str(round_)]
            await store.release(1)

    inside(scenario())


def test_the_first_failure_reaches_all_who_wait_now_or_later():
    async def scenario() -> None:
        store = MemoryStore(1)
        await store.admit()
        waiting = [asyncio.create_task(store.admit()) for _ in range(2)] + [asyncio.create_task(store.take(1))]
        await settle()
        store.fail(ProducerDied("first"))
        store.fail(ProducerDied("second"))
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(error) for error in ended] == ["first"] * 3
        for late in (store.admit(), store.take(1)):
            with pytest.raises(ProducerDied, match="first"):
                await late

    inside(scenario())


def test_no_group_in_time_is_a_named_error():
    async def scenario() -> None:
        store = MemoryStore(2, take_timeout_s=0.05)
        await store.admit()
        with pytest.raises(StoreTimeout, match=r"1 groups did not finish within 0.05 s .*1 are in progress") as caught:
            await store.take(1)
        assert isinstance(caught.value, TimeoutError)

    inside(scenario())


# --- any interleaving


@dataclass
class Model:
    """What a store is, in the plainest words: lists in order of start."""

    slots: int
    started: int = 0
    playing: list[int] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    taken: int = 0
    waiting: int = 0

    @property
    def in_flight(self) -> list[int]:
        return sorted([*self.playing, *self.finished])

    def let_in(self) -> None:
        while self.waiting and len(self.in_flight) + self.taken < self.slots:
            self.playing.append(self.started)
            self.started += 1
            self.waiting -= 1

    def can_take(self, count: int) -> bool:
        oldest = self.in_flight[:count]
        return len(oldest) == count and self.finished.issuperset(oldest)


async def drive(store: MemoryStore, seed: int, steps: int) -> int:
    """Random calls; after each, the store must be where the model is. Returns how many groups were taken."""
    rng, model, took = random.Random(seed), Model(store.slots), 0
    tickets: dict[int, Ticket] = {}
    asking: list[asyncio.Task[Ticket]] = []
    for _ in range(steps):
        action = rng.choice(["ask", "ask", "put", "put", "drop", "take", "release", "leave"])
        if action == "ask":
            asking.append(asyncio.create_task(store.admit()))
            model.waiting += 1
        elif action == "leave" and asking:
            asking.pop(rng.randrange(len(asking))).cancel()
            model.waiting -= 1
        elif action in ("put", "drop") and model.playing:
            order = model.playing.pop(rng.randrange(len(model.playing)))
            if action == "put":
                await store.put(tickets[order], group(order))
                model.finished.add(order)
            else:
                await store.drop(tickets[order], "no_signal")
        elif action == "take" and model.can_take(count := rng.randint(1, 3)):
            expected = model.in_flight[:count]
            assert names(await store.take(count)) == [str(order) for order in expected]
            model.finished -= set(expected)
            model.taken += count
            took += count
        elif action == "release" and model.taken:
            count = rng.randint(1, model.taken)
            await store.release(count)
            model.taken -= count
        model.let_in()
        await settle()
        while asking and asking[0].done():  # in the order of the calls
            ticket = await asking.pop(0)
            tickets[ticket.order] = ticket
        assert sorted(tickets) == list(range(model.started))
        assert len(asking) == model.waiting
        assert not any(task.done() for task in asking)
    for task in asking:
        task.cancel()
    return took


class ForgetsTheSlotOfACancelledWait(MemoryStore):
    def _free(self, count: int) -> None:
        self._waiting = type(self._waiting)(waiter for waiter in self._waiting if not waiter.done())
        self._held -= count if self._waiting else 0
        super()._free(0)


class FreesTheSlotWithTake(MemoryStore):
    async def take(self, count: int) -> list[Group]:
        groups = await super().take(count)
        self._free(count)
        return groups

    async def release(self, count: int) -> None:
        pass


class HandsOutInFinishOrder(MemoryStore):
    async def put(self, ticket: Ticket, group: Group) -> None:
        await super().put(ticket, group)
        self._in_flight[ticket.order] = self._in_flight.pop(ticket.order)
        ready = [(order, each) for order, each in self._in_flight.items() if each is not None]
        self._in_flight = dict(ready + [(o, each) for o, each in self._in_flight.items() if each is None])


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_any_interleaving_agrees_with_a_simple_model(slots):
    assert sum(inside(drive(MemoryStore(slots), seed, 120)) for seed in range(20)) > 50


@pytest.mark.parametrize("planted", [ForgetsTheSlotOfACancelledWait, FreesTheSlotWithTake, HandsOutInFinishOrder])
def test_planted_stores_do_not_agree_with_the_model(planted):
    with pytest.raises(AssertionError):
        assert [inside(drive(planted(3), seed, 120)) for seed in range(20)]
