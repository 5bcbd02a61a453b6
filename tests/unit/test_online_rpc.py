"""The socket between server and trainer: answers and errors cross it; a peer that breaks its rules is cut off."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tandem.errors import CheckpointDamaged, SyncTimeout
from tandem.io import json_frames
from tandem.online.messages import Cancel, JobProgress, Load, RpcCall, RpcRequest, Sequence1, decode, from_wire, to_wire
from tandem.online.rpc import ConnectionLost, RpcConnection
from tandem.types import NO_VERSION, Trajectory


async def nothing(what: RpcCall) -> dict[str, Any]:
    raise AssertionError(f"nobody should ask: {what}")


def joined(
    handle: Callable[[RpcCall], Awaitable[dict[str, Any]]],
    play: Callable[[RpcConnection, RpcConnection], Awaitable[None]],
) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        one, other = RpcConnection(nothing, "answering process"), RpcConnection(handle, "calling process")
        await one.start(ours)
        await other.start(theirs)
        try:
            async with asyncio.timeout(10):
                await play(one, other)
        finally:
            await one.close()
            await other.close()

    asyncio.run(run())


def test_questions_are_answered_side_by_side_and_errors_keep_their_class():
    async def handle(what: RpcCall) -> dict[str, Any]:
        match what:
            case Load(version=7):
                raise CheckpointDamaged("it is damaged")
            case Load(version=8):
                raise RuntimeError("odd")
            case Load(version=version):
                await asyncio.sleep(0.05 / (version + 1))
                return {"version": version}
            case _:
                raise SyncTimeout("late")

    async def play(one: RpcConnection, _: RpcConnection) -> None:
        answers = await asyncio.gather(*(one.call(Load(version)) for version in range(5)))
        assert [answer["version"] for answer in answers] == [0, 1, 2, 3, 4]
        with pytest.raises(CheckpointDamaged, match="it is damaged"):
            await one.call(Load(7))
        with pytest.raises(Exception, match="RuntimeError: odd"):
            await one.call(Load(8))
        with pytest.raises(SyncTimeout):
            await one.call(Cancel("x"))

    joined(handle, play)


def test_whoever_waits_hears_that_the_other_half_is_gone():
    async def handle(what: RpcCall) -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    async def play(one: RpcConnection, other: RpcConnection) -> None:
        waiting = asyncio.create_task(one.call(Load(1)))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await one.call(Load(2), 0.05)
        await other.close()
        with pytest.raises(ConnectionLost, match="answering process is gone"):
            await waiting
        with pytest.raises(ConnectionLost):
            await one.call(Load(3))
        one.notify(JobProgress("x", 1, 1, {}))

    joined(handle, play)


@pytest.mark.parametrize(
    "frame",
    [
        b"not json",
        b'{"type":"q","number":1,"what":{"type":"Exec","code":"1"}}',
        b'{"type":"q","number":1,"what":{"type":"Load","version":1,"path":"/"}}',
        b'{"type":"q","number":1,"what":{"type":"Load","version":-1}}',
        b'{"type":"q","number":1,"what":{"type":"Load","version":"1"}}',
    ],
)
def test_what_is_not_of_the_protocol_cuts_the_other_half_off(frame: bytes):
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        decode(frame)

    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        peer = RpcConnection(nothing, "odd process")
        await peer.start(ours)
        theirs.sendall(len(frame).to_bytes(4, "big") + frame)
        await asyncio.wait_for(peer.gone.wait(), 5)
        theirs.close()

    asyncio.run(run())


def test_a_frame_without_end_is_not_waited_for():
    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        peer = RpcConnection(nothing, "odd process")
        await peer.start(ours)
        theirs.sendall((json_frames.MAX_BYTES + 1).to_bytes(4, "big"))
        await asyncio.wait_for(peer.gone.wait(), 5)
        theirs.close()

    asyncio.run(run())


def test_trajectories_cross_as_they_are():
    recorded = Trajectory([5, 6, 7], [False, True, True], [0.0] * 3, [NO_VERSION] * 3, status="recorded", task_id="t")
    sampled = Trajectory(
        [5, 6, 7], [False, True, False], [0.0, -1.5, 0.0], [NO_VERSION, 3, NO_VERSION], 0.5, task_id="t"
    )
    for each in (recorded, sampled):
        assert from_wire(to_wire(each), "t") == each
    with pytest.raises(msgspec.ValidationError):
        from_wire(Sequence1([1, 2, 3], 1, "1"), "t")
    assert isinstance(decode(msgspec.json.encode(RpcRequest(1, Load(2)))), RpcRequest)
