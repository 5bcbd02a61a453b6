"""Shared buffers of a bridge: no receiver reads a buffer that is being written, or maps another connection's."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from bridges import BUCKET_BYTES, COPYING, LENT, as_served, bits, carry, channel_of, meet, weights_of

from stopwatch import Stopwatch
from tandem.bridge.collective import control_channel, sender
from tandem.bridge.collective.control_channel import ControlChannel
from tandem.bridge.collective.sender import AdapterBroadcastBridge, BroadcastBridge, Transport
from tandem.bridge.collective.shared_buffers import BufferReader, BufferWriter, MappedBuffers
from tandem.errors import SyncError, SyncTimeout
from tandem.vllm_worker.weight_sources import open_source

OURS, OTHER = "GPU-1", "GPU-2"


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_frozen() -> Iterator[None]:
    """Free what earlier files left, and leave the rest out of the collections of `_segments_held`: each would visit a
    million objects, of torch for the most part."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", LENT)
def test_it_is_told_which_way_was_asked_for_and_taken(name: str, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 10.0)
    sent, _ = carry(bridge, meet(bridge), weights_of(1, bridge.carries))
    assert sent.transport == {"requested": "ipc", "engaged": "memory", "why": ""}
    bridge.close()


def test_on_a_cpu_auto_is_gloo(tmp_path: Path) -> None:
    bridge = COPYING["adapter_broadcast"](tmp_path, 10.0)
    sent, _ = carry(bridge, meet(bridge), weights_of(1, bridge.carries))
    assert sent.transport == {"requested": "auto", "engaged": "gloo", "why": ""}
    bridge.close()


@pytest.mark.parametrize(
    ("requested", "theirs", "roomy", "engaged"),
    [
        ("auto", [OURS], True, "ipc"),
        ("auto", [OURS, OURS], True, "ipc"),
        ("auto", [OURS], False, "gloo"),
        ("auto", [OTHER], True, "nccl"),
        ("auto", [OTHER, "GPU-3"], False, "nccl"),
        ("auto", [OTHER, OTHER], True, "gloo"),
        ("auto", [OURS, OTHER], True, "gloo"),
        ("auto", ["cpu"], True, "gloo"),
        ("auto", [""], True, "gloo"),
        ("gloo", [OURS], True, "gloo"),
        ("ipc", [OURS], False, "ipc"),
        ("ipc", [OTHER], True, "the trainer is on GPU GPU-1 and an engine on GPU-2"),
        ("nccl", [OTHER], True, "nccl"),
        ("nccl", [OURS], True, "two of its ranks on one GPU"),
    ],
)
def test_which_way_suits_which_gpus(
    requested: Any, theirs: list[str], roomy: bool, engaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "device_name", lambda device: OURS)
    arguments = ("broadcast", requested, torch.device("cuda", 0), theirs)
    if " " in engaged:
        with pytest.raises(SyncError, match=engaged):
            sender.choose_transport(*arguments, roomy=roomy)
        return
    chosen = sender.choose_transport(*arguments, roomy=roomy)
    assert (chosen.requested, chosen.engaged) == (requested, engaged)
    assert bool(chosen.why) == (requested == "auto" and engaged == "gloo")


def test_a_cpu_has_no_nccl() -> None:
    with pytest.raises(SyncError, match="the trainer is on a CPU"):
        sender.choose_transport("broadcast", "nccl", torch.device("cpu"), [""], roomy=True)


# --- who writes, and who reads


def test_no_room_is_written_before_the_slowest_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three receivers, one of them slow, and many more buckets than rooms."""
    settle = BufferReader.settle

    def slow(self: Any, *args: Any) -> None:
        time.sleep(0.005 if self._rank == 2 else 0)
        settle(self, *args)

    before = threading.Event()

    def slow_to_begin(self: Any, into: torch.Tensor, deadline: Any) -> None:
        self._channel.read(f"{self._sequence}/lent/{self._num_taken}", "", deadline)
        time.sleep(0.02 if self._rank == 2 else 0)  # told, and not yet reading
        before.set()
        broadcast(self, into, deadline)

    broadcast = BufferReader.broadcast
    monkeypatch.setattr(BufferReader, "settle", slow)
    monkeypatch.setattr(BufferReader, "broadcast", slow_to_begin)
    bridge = BroadcastBridge(bucket_bytes=BUCKET_BYTES, deadline_s=20, backend="ipc")
    source = meet(bridge, num_receivers=3)
    for version in (1, 2):
        _, received = carry(bridge, source, weights_of(version, "full"), ranks=(0, 1, 2))
        assert {str(bits(each.tensors())) for each in received} == {str(bits(as_served("full", version)))}
    assert before.is_set()
    bridge.close()


@pytest.mark.parametrize("name", LENT)
def test_what_was_written_over_as_it_was_read_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = COPYING[name](tmp_path, 10.0)
    source = meet(bridge)
    carry(bridge, source, weights_of(1, bridge.carries))
    tell = BufferWriter.broadcast

    def spoil(self: Any, buffer: torch.Tensor, deadline: Any) -> int:
        buffer[-8:] = 77
        return tell(self, buffer, deadline)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as threads:
        patch.setattr(BufferWriter, "broadcast", spoil)
        answer = threads.submit(source.receive, 2)
        with pytest.raises(SyncError, match=r"version 2 was refused: receiver 0: .* is not what was sent"):
            bridge.send(weights_of(2, bridge.carries))
        with pytest.raises(SyncError, match="is not what was sent"):
            answer.result(timeout=10)
    _, (received,) = carry(bridge, source, weights_of(2, bridge.carries))
    assert bits(received.tensors()) == bits(as_served(bridge.carries, 2))
    bridge.close()


@pytest.mark.parametrize("name", LENT)
def test_who_still_reads_when_a_meeting_is_broken_off_finds_nothing_of_the_next(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = COPYING[name](tmp_path, 1.0)
    late = open_source(dict(meet(bridge).link))
    reading, go_on, rooms = threading.Event(), threading.Event(), list[list[torch.Tensor]]()

    def stuck(self: Any, *_: Any) -> None:
        rooms.append(self._memory.tensors)
        reading.set()
        assert go_on.wait(20)

    with ThreadPoolExecutor(1) as threads:
        with monkeypatch.context() as patch:
            patch.setattr(BufferReader, "settle", stuck)
            answer = threads.submit(late.receive, 1)
            with pytest.raises(
                SyncTimeout, match=r"version 1(: receiver 0 did not confirm it| was not taken) within 1 s"
            ):
                bridge.send(weights_of(1, bridge.carries))
            assert reading.is_set()
        was = [room.clone() for room in rooms[0]]
        _, (received,) = carry(bridge, meet(bridge), weights_of(2, bridge.carries))
        assert bits(received.tensors()) == bits(as_served(bridge.carries, 2))
        assert all(torch.equal(room, before) for room, before in zip(rooms[0], was, strict=True))
        go_on.set()
        with pytest.raises(SyncError):
            answer.result(timeout=10)
    bridge.close()


@pytest.mark.parametrize("name", LENT)
def test_either_ends_trouble_in_the_middle_is_told_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise SyncError("the device fell off")

    for end, verb in ((BufferReader, "settle"), (BufferWriter, "settle")):
        bridge = COPYING[name](tmp_path, 20.0)
        source = meet(bridge)
        with monkeypatch.context() as patch, ThreadPoolExecutor(1) as threads:
            patch.setattr(end, verb, fails)
            with Stopwatch() as watch:
                answer = threads.submit(source.receive, 1)
                with pytest.raises(SyncError, match="the device fell off"):
                    bridge.send(weights_of(1, bridge.carries))
                with pytest.raises(SyncError, match="the device fell off"):
                    answer.result(timeout=10)
            assert watch.seconds < 5
        bridge.close()


# --- one worker, one bucket: what is filled before it is announced


def test_a_version_for_one_worker_takes_one_round_of_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The announcement and the verdict: no note waits for another one in between. The worker asks the store three
    times: for what is new, for the right to read it, and to say that it did."""
    written, asked = list[str](), list[str]()
    write, announce, call = ControlChannel.write, ControlChannel.announce, ControlChannel._call

    def counted(self: Any, key: str, *args: Any) -> None:
        written.append(key)
        write(self, key, *args)

    def announced(self: Any, sequence: int, *args: Any, **more: Any) -> None:
        written.append(f"{sequence}/manifest")
        announce(self, sequence, *args, **more)

    def called(self: Any, function: Any, what_failed: str, deadline: Any) -> Any:
        if not self._mine:
            asked.append(what_failed)
        return call(self, function, what_failed, deadline)

    bridge = AdapterBroadcastBridge(deadline_s=10, backend="ipc")
    source = meet(bridge)
    carry(bridge, source, weights_of(1, "adapter"))
    monkeypatch.setattr(ControlChannel, "_call", called)
    monkeypatch.setattr(ControlChannel, "write", counted)
    monkeypatch.setattr(ControlChannel, "announce", announced)
    _, (received,) = carry(bridge, source, weights_of(2, "adapter"))
    assert bits(received.tensors()) == bits(as_served("adapter", 2))
    assert written == ["2/manifest", "2/done/1"]
    assert len(asked) == 3, asked
    bridge.close()


class Slow:
    """A store that takes several keys one by one, as the real one does when they do not come in one packet."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._store.set(key, value)
            time.sleep(0.05)


def test_an_announcement_that_comes_bit_by_bit_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixed = control_channel.PrefixStore
    monkeypatch.setattr(control_channel, "PrefixStore", lambda prefix, store: Slow(prefixed(prefix, store)))
    bridge = AdapterBroadcastBridge(deadline_s=3, backend="ipc")
    source = meet(bridge)
    for version in (1, 2):
        _, (received,) = carry(bridge, source, weights_of(version, "adapter"))
        assert received.version == version
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(source.receive, 3)
        time.sleep(0.1)
        source.close = lambda: None  # the engine is another process: it hears of it by the store alone
        bridge.close()
        with pytest.raises(SyncError, match="the trainer closed this connection"):
            answer.result(timeout=10)


def test_what_a_worker_has_claimed_is_never_written_again_and_the_meeting_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads on when the trainer has given up."""
    bridge = AdapterBroadcastBridge(deadline_s=1, backend="ipc")
    source = meet(bridge)
    reading, go_on, rooms = threading.Event(), threading.Event(), list[torch.Tensor]()
    settle = BufferReader.settle

    def slow(self: Any, *args: Any) -> None:
        rooms.append(self._memory.tensors[0])
        reading.set()
        assert go_on.wait(20)
        settle(self, *args)

    monkeypatch.setattr(BufferReader, "settle", slow)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(source.receive, 1)
        with pytest.raises(SyncTimeout, match="version 1: receiver 0 did not confirm it within 1 s"):
            bridge.send(weights_of(1, "adapter"))
        assert reading.is_set()
        was = rooms[0].clone()
        with pytest.raises(SyncError, match="this connection has ended"):
            bridge.send(weights_of(2, "adapter"))
        assert torch.equal(rooms[0], was)
        go_on.set()
        with pytest.raises(SyncTimeout):
            answer.result(timeout=10)
    bridge.close()


def test_what_the_trainer_took_back_is_read_by_nobody_who_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has seen the announcement, and not claimed it yet: so the room may be written, and the next version is its."""
    bridge = AdapterBroadcastBridge(deadline_s=1.5, backend="ipc")
    source = meet(bridge)
    seen, go_on, claims, read = threading.Event(), threading.Event(), list[bool](), list[int]()
    claim, borrow = ControlChannel.claim, BufferReader.broadcast

    def late(self: Any, *args: Any, **more: Any) -> bool:
        if not self._mine and not claims:
            seen.set()
            assert go_on.wait(20)
        claimed = claim(self, *args, **more)
        if not self._mine:
            claims.append(claimed)
        return claimed

    def counted(self: Any, *args: Any) -> None:
        read.append(self._sequence)
        borrow(self, *args)

    monkeypatch.setattr(ControlChannel, "claim", late)
    monkeypatch.setattr(BufferReader, "broadcast", counted)
    link = dict(source.link) | {"deadline_s": 20.0}
    theirs = open_source(link)
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(theirs.receive, 1)
        with pytest.raises(SyncTimeout, match=r"for version 1, receiver 0 did not come within 1\.5 s"):
            bridge.send(weights_of(1, "adapter"))
        assert seen.is_set()
        again = threads.submit(bridge.send, weights_of(1, "adapter", as_served("adapter", 7)))
        time.sleep(0.1)
        go_on.set()
        again.result(timeout=10)
        assert bits(answer.result(timeout=10).tensors()) == bits(as_served("adapter", 7))
    assert (claims, read) == ([False, True], [2])
    bridge.close()


def test_who_is_asked_for_another_version_reads_nothing_and_the_room_is_written_again() -> None:
    bridge = AdapterBroadcastBridge(deadline_s=10, backend="ipc")
    source = meet(bridge)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(source.receive, 7)
        for version in (5, 6):
            with pytest.raises(SyncError, match=f"refused: receiver 0: asked for version 7, sent was {version}"):
                bridge.send(weights_of(version, "adapter"))
        channel = channel_of(source.link)
        assert channel.has("2/manifest")
        assert not channel.has("2/unclaimed")  # another process with this link could not read it either
        bridge.send(weights_of(7, "adapter"))
        assert bits(answer.result(timeout=10).tensors()) == bits(as_served("adapter", 7))
    bridge.close()


# --- whose memory it is


def of_another_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process that the handle names had been replaced by another one."""
    lend = sender.SharedBuffers

    def foreign(name: str, *args: Any) -> Any:
        return lend("f" * len(name), *args)

    monkeypatch.setattr(sender, "SharedBuffers", foreign)


def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle has the right name, and what it leads to has not."""
    lend = sender.SharedBuffers

    def foreign(name: str, *args: Any) -> Any:
        memory = lend("f" * len(name), *args)
        memory.handles = [{**handle, "meeting": name} for handle in memory.handles]
        return memory

    monkeypatch.setattr(sender, "SharedBuffers", foreign)


@pytest.mark.parametrize("plant", [of_another_meeting, renamed])
def test_the_memory_of_another_meeting_is_refused_before_anything_is_read(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    bridge = AdapterBroadcastBridge(deadline_s=10, backend="ipc")
    source = meet(bridge)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(source.receive, 1)
        with pytest.raises(SyncError, match=r"receiver 0: the trainer's memory cannot be mapped here: .* connection"):
            bridge.send(weights_of(1, "adapter"))
        with pytest.raises(SyncError, match="cannot be mapped here"):
            answer.result(timeout=10)
    bridge.close()


def test_what_one_engine_cannot_map_goes_to_all_by_gloo_and_it_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `auto`. The others had mapped it, and wait on."""
    monkeypatch.setattr(sender, "choose_transport", lambda *_, **__: Transport("auto", "memory"))
    lend = sender.SharedBuffers

    def unlike(*args: Any) -> Any:
        memory = lend(*args)
        memory.handles[1] = {**memory.handles[1], "fd": 10**6}
        return memory

    monkeypatch.setattr(sender, "SharedBuffers", unlike)
    bridge = AdapterBroadcastBridge(deadline_s=10)
    before = _segments_held()
    source = meet(bridge, num_receivers=2)
    for version in (1, 2):
        sent, received = carry(bridge, source, weights_of(version, "adapter"), ranks=(0, 1))
        assert _segments_held() == before  # what nobody reads is given up, at both ends
        assert (sent.transport["requested"], sent.transport["engaged"]) == ("auto", "gloo")
        assert "receiver 1: the trainer's memory cannot be mapped here" in sent.transport["why"]
        assert [bits(each.tensors()) for each in received] == [bits(as_served("adapter", version))] * 2
    bridge.close()


def test_memory_is_mapped_once_a_meeting_and_anew_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Counted(MappedBuffers):
        def __init__(self, handle: Any, name: str) -> None:
            opened.append(name)
            super().__init__(handle, name)

    monkeypatch.setattr("tandem.bridge.collective.receiver.MappedBuffers", Counted)
    bridge = AdapterBroadcastBridge(deadline_s=10, backend="ipc")
    for _ in range(2):
        source = meet(bridge)
        for version in (1, 2, 3):
            carry(bridge, source, weights_of(version, "adapter"))
    bridge.close()
    assert len(opened) == len(set(opened)) == 2


def test_a_larger_version_gets_larger_rooms() -> None:
    bridge = BroadcastBridge(bucket_bytes=BUCKET_BYTES, deadline_s=10, backend="ipc")
    for length in (3, BUCKET_BYTES // 4, 2000):
        tensors = {"q": torch.arange(length, dtype=torch.float32)}
        source = bridge.source()
        source.attached({"boot_id": "engine-1", "layout": {"q": ["float32", [length]]}})
        _, (received,) = carry(bridge, source, weights_of(1, "full", tensors))
        assert bits(received.tensors()) == bits(tensors)
    bridge.close()


def test_meetings_leave_no_memory_behind() -> None:
    bridge, held = AdapterBroadcastBridge(deadline_s=10, backend="ipc"), list[int]()
    before = _segments_held()
    for version in range(4):
        carry(bridge, meet(bridge), weights_of(version, "adapter"))
        held.append(_segments_held())
    bridge.close()
    assert before < held[0] == held[-1]
    assert _segments_held() == before


def _segments_held() -> int:
    gc.collect()
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum("tandem-weights" in os.readlink(link) for link in links if os.path.lexists(link))
