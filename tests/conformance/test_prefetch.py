"""Prefetching the next version changes when it is copied, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bridges import as_served, bits, carry, channel_of, meet, weights_of

from stopwatch import Stopwatch
from tandem.bridge.collective.control_channel import ControlChannel
from tandem.bridge.collective.sender import AdapterBroadcastBridge
from tandem.bridge.collective.shared_buffers import BufferReader
from tandem.errors import SyncError, SyncTimeout
from tandem.vllm_worker.weight_sources import EngineEnd, open_source

AHEAD = "sync"  # the name of the threads that look


class Pair:
    """Both ends, after the first version. The engine's deadline is longer than the trainer's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, deadline_s: float = 10.0) -> None:
        self.bridge = AdapterBroadcastBridge(deadline_s=deadline_s, backend="ipc")
        self.link = dict(meet(self.bridge).link)
        self.engine: EngineEnd = open_source(self.link | {"deadline_s": 20.0})
        self.engine.reuse_buffer()
        self.copies: list[str] = []
        copy = BufferReader.broadcast

        def counted(carrier: Any, *args: Any) -> None:
            copy(carrier, *args)
            self.copies.append(threading.current_thread().name)

        monkeypatch.setattr(BufferReader, "broadcast", counted)
        assert self.carry(1) == bits(as_served("adapter", 1))
        self.copies.clear()

    def carry(self, version: int) -> dict[str, str]:
        _, (received,) = carry(self.bridge, self.engine, weights_of(version, "adapter"))
        return bits(received.tensors())


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    both = Pair(monkeypatch)
    yield both
    both.engine.close()
    both.bridge.close()


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.005)


@pytest.mark.parametrize("verify_where_served", [False, True])
def test_a_prefetched_version_is_claimed_when_it_is_asked_for(pair: Pair, verify_where_served: bool) -> None:
    if verify_where_served:
        pair.engine.verify_where_served()
    with ThreadPoolExecutor(1) as threads:
        for version in (2, 3, 4):
            pair.engine.prefetch()
            sending = threads.submit(pair.bridge.send, weights_of(version, "adapter"))
            until(lambda: pair.copies)
            assert channel_of(pair.link).has(f"{version}/unclaimed")
            assert not sending.done()
            assert bits(pair.engine.receive(version).tensors()) == bits(as_served("adapter", version))
            sending.result(timeout=10)
            assert pair.copies == [AHEAD]
            pair.copies.clear()


def test_it_arrives_in_the_same_place(pair: Pair) -> None:
    pair.engine.prefetch()
    _, (second,) = carry(pair.bridge, pair.engine, weights_of(2, "adapter"))
    pair.engine.prefetch()
    _, (third,) = carry(pair.bridge, pair.engine, weights_of(3, "adapter"))
    assert all(a is b for (_, a), (_, b) in zip(second.tensors(), third.tensors(), strict=True))


def test_a_copy_of_what_the_trainer_took_back_is_of_no_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, deadline_s=1.0)
    pair.engine.prefetch()
    with pytest.raises(SyncTimeout, match="receiver 0 did not come"):
        pair.bridge.send(weights_of(2, "adapter"))
    assert pair.copies == [AHEAD]
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(pair.bridge.send, weights_of(2, "adapter", as_served("adapter", 7)))
        assert bits(pair.engine.receive(2).tensors()) == bits(as_served("adapter", 7))
        again.result(timeout=10)
    pair.engine.close()
    pair.bridge.close()


def test_of_another_version_than_is_asked_for_nothing_is_taken(pair: Pair) -> None:
    pair.engine.prefetch()
    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(pair.bridge.send, weights_of(2, "adapter"))
        until(lambda: pair.copies)
        asked = threads.submit(pair.engine.receive, 3)
        with pytest.raises(SyncError, match="asked for version 3, sent was 2"):
            sending.result(timeout=10)
        pair.bridge.send(weights_of(3, "adapter"))
        assert bits(asked.result(timeout=10).tensors()) == bits(as_served("adapter", 3))


def test_a_copy_that_is_not_what_was_sent_is_refused_and_the_trainer_hears_of_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = BufferReader.broadcast

    def spoilt(carrier: Any, into: Any, deadline: Any) -> None:
        copy(carrier, into, deadline)
        into[3] ^= 1

    monkeypatch.setattr(BufferReader, "broadcast", spoilt)
    pair.engine.prefetch()
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(pair.bridge.send, weights_of(2, "adapter"))
        with pytest.raises(SyncError, match="is not what was sent"):
            pair.engine.receive(2)
        with pytest.raises(SyncError, match=r"version 2 was refused: receiver 0: .* is not what was sent"):
            sending.result(timeout=10)


def test_what_goes_wrong_ahead_goes_wrong_for_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, failed = BufferReader.settle, list[str]()

    def fails(self: Any, *args: Any) -> None:
        if threading.current_thread().name == AHEAD:
            failed.append(AHEAD)
            raise RuntimeError("the device fell off")
        settle(self, *args)

    monkeypatch.setattr(BufferReader, "settle", fails)
    for version in (2, 3):
        pair.engine.prefetch()
        assert pair.carry(version) == bits(as_served("adapter", version))
    assert failed == [AHEAD] * 2


def test_whoever_waits_for_what_does_not_come_is_told_so_and_may_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    engine: Any = pair.engine
    engine._deadline_s = 0.5
    pair.engine.prefetch()
    for _ in range(2):
        with Stopwatch() as watch, pytest.raises(SyncTimeout, match=r"version 2 was not sent within 0\.5 s"):
            pair.engine.receive(2)
        assert watch.seconds < 3
    engine._deadline_s = 20.0
    assert pair.carry(2) == bits(as_served("adapter", 2))
    assert pair.copies == [AHEAD]
    pair.engine.close()
    pair.bridge.close()


@pytest.mark.parametrize(
    ("whose", "why"), [("engine", "it was closed"), ("bridge", "the trainer closed this connection")]
)
def test_it_ends_when_either_end_closes(pair: Pair, whose: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, began, ended = ControlChannel.newest, threading.Event(), threading.Event()

    def watched(*args: Any) -> Any:
        assert threading.current_thread().name == AHEAD
        began.set()
        try:
            return newest(*args)
        finally:
            ended.set()

    with monkeypatch.context() as patch:
        patch.setattr(ControlChannel, "newest", watched)
        pair.engine.prefetch()
        until(began.is_set)
        time.sleep(0.05)
        assert not ended.is_set()
        getattr(pair, whose).close()
        until(ended.is_set)
    with pytest.raises(SyncError, match=why):
        pair.engine.receive(2)


def test_several_workers_agree_first_as_ever() -> None:
    bridge = AdapterBroadcastBridge(deadline_s=10, backend="ipc")
    source: Any = meet(bridge, num_receivers=2)
    source.reuse_buffer()
    for version in (1, 2, 3):
        _, received = carry(bridge, source, weights_of(version, "adapter"), ranks=(0, 1))
        assert [bits(each.tensors()) for each in received] == [bits(as_served("adapter", version))] * 2
        for rank in (0, 1):
            source.prefetch(rank)
    bridge.close()


def test_who_has_copied_nothing_yet_is_not_looked_for(pair: Pair) -> None:
    """Before the first version it is not known which way they come."""
    engine = open_source(dict(meet(pair.bridge).link))
    engine.reuse_buffer()
    engine.prefetch()
    _, (received,) = carry(pair.bridge, engine, weights_of(1, "adapter"))
    assert pair.copies
    assert AHEAD not in pair.copies
    assert bits(received.tensors()) == bits(as_served("adapter", 1))
    engine.close()
