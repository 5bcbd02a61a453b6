"""TrainerSupervisor with a trainer process that works, hangs, dies in a job, or dies while idle."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import EngineError
from tandem.online.messages import JobProgress, Open, RpcCall, Settle, Teaching, Train
from tandem.online.rpc import ConnectionLost
from tandem.online.trainer_supervisor import TrainerProcess, TrainerSupervisor

STEP_S, DEADLINE_S, MOST = 0.2, 0.8, 2

TRAINER = f"""
import asyncio, os, socket, sys
import msgspec
from tandem.online.rpc import RpcConnection
from tandem.online.messages import Open, WorkerOpened, JobProgress, Train, Trained

async def main():
    async def handle(what):
        match what:
            case Open():
                return msgspec.to_builtins(WorkerOpened(7, "digest", True, 11))
            case Train(job="dies"):
                print("its last words", flush=True)
                os._exit(3)
            case Train(job=job, teaching=teaching):
                for step in range(teaching.steps):
                    await asyncio.sleep({STEP_S})
                    server.notify(JobProgress(job, step + 1, teaching.steps, {{}}))
                return msgspec.to_builtins(Trained("passed", digest="new"))
            case _:
                await asyncio.sleep(60)
    server = RpcConnection(handle, "server process")
    await server.start(socket.socket(fileno=int(sys.argv[-1])))
    await server.gone.wait()

asyncio.run(main())
"""


def train(job: str, steps: int = 1) -> Train:
    return Train(job, 8, 7, [], [], 0, [], [], Teaching("sft", 1e-3, steps, "none", 0))


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[TrainerSupervisor], Awaitable[None]]], list[RpcCall]]:
    """Run a story with a supervisor whose process has started; return the requests and notifications it sent."""

    def played(story: Callable[[TrainerSupervisor], Awaitable[None]]) -> list[RpcCall]:
        told: list[RpcCall] = []

        async def handle(what: RpcCall) -> dict[str, Any]:
            told.append(what)
            return {}

        def start() -> TrainerProcess:
            return TrainerProcess([sys.executable, "-c", TRAINER], tmp_path / "log.txt", {})

        async def run() -> None:
            supervisor = TrainerSupervisor(start, handle, DEADLINE_S, MOST)
            try:
                await begin(supervisor)
                await story(supervisor)
            finally:
                await supervisor.end()

        asyncio.run(run())
        return told

    return played


async def begin(supervisor: TrainerSupervisor) -> int:
    opened = await supervisor.begin(Open({}, "", 7, [7]), 20)
    assert (opened.version, opened.parameters) == (7, 11)
    assert not supervisor.is_gone
    return supervisor.status()["pid"]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_job_may_take_longer_than_the_deadline_as_long_as_it_moves(play: Any) -> None:
    async def story(supervisor: TrainerSupervisor) -> None:
        assert (await supervisor.train(train("long", steps=10))).digest == "new"

    assert [what.step for what in play(story) if isinstance(what, JobProgress)] == [*range(1, 11)]


def test_one_that_does_not_answer_is_lost_and_nothing_of_it_is_left(play: Any) -> None:
    async def story(supervisor: TrainerSupervisor) -> None:
        before = supervisor.status()["pid"]
        with pytest.raises(ConnectionLost, match=r"did not reply to Settle in 0\.8 s") as lost:
            await supervisor.call(Settle(8, True))
        await supervisor.lost(lost.value)
        assert supervisor.is_gone
        assert not is_there(before)
        assert supervisor.why_lost.startswith(str(lost.value))
        await supervisor.pause()
        assert await begin(supervisor) != before
        assert supervisor.status()["restarts"] == 1

    play(story)


def test_one_that_stands_still_in_a_job_is_lost(play: Any) -> None:
    async def story(supervisor: TrainerSupervisor) -> None:
        asyncio.get_running_loop().call_later(0.3, os.kill, supervisor.status()["pid"], signal.SIGSTOP)
        with pytest.raises(ConnectionLost, match="finished no step of a job"):
            await supervisor.train(train("long", steps=100))

    play(story)


def test_its_last_words_are_told_and_too_many_deaths_in_a_row_end_it(play: Any) -> None:
    async def story(supervisor: TrainerSupervisor) -> None:
        for _ in range(MOST + 1):
            with pytest.raises(ConnectionLost) as lost:
                await supervisor.train(train("dies"))
            await supervisor.lost(lost.value)
            assert supervisor.why_lost.endswith("exit code 3; its last words")
            if supervisor.status()["restarts"] <= MOST:
                await supervisor.pause()
                await begin(supervisor)
        with pytest.raises(EngineError, match=r"died 3 times in a row, and max_restarts = 2.*its last words"):
            await supervisor.pause()
        assert supervisor.status()["why"] == supervisor.why_given_up != ""

    play(story)


def test_one_that_dies_with_nothing_to_do_is_told_of_and_not_counted(
    play: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(supervisor: TrainerSupervisor) -> None:
        for _ in range(MOST + 1):
            os.kill(supervisor.status()["pid"], signal.SIGKILL)
            while not supervisor.is_gone:
                await asyncio.sleep(0.01)
            await begin(supervisor)
        assert supervisor.status()["restarts"] == 0
        assert supervisor.why_lost.endswith("while it was idle: signal 9")

    with caplog.at_level(logging.ERROR):
        play(story)
    assert sum("while it was idle: signal 9" in record.message for record in caplog.records) == MOST + 1


def test_another_one_takes_the_place_of_one_that_lives(play: Any) -> None:
    async def story(supervisor: TrainerSupervisor) -> None:
        before = supervisor.status()["pid"]
        await begin(supervisor)
        assert not is_there(before)

    play(story)
