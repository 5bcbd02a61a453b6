"""A trainer process moves, stands still, dies at work or by itself; each time it is known, and another one can
begin."""

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
from tandem.online.messages import Asked, JobProgress, Open, Settle, Teaching, Train
from tandem.online.rpc import PeerLost
from tandem.online.trainer_supervisor import TrainerProcess, TrainerSupervisor

STEP_S, DEADLINE_S, MOST = 0.2, 0.8, 2

HALF = f"""
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
                    peer.tell(JobProgress(job, step + 1, teaching.steps, {{}}))
                return msgspec.to_builtins(Trained("passed", digest="new"))
            case _:
                await asyncio.sleep(60)
    peer = RpcConnection(handle, "server process")
    await peer.start(socket.socket(fileno=int(sys.argv[-1])))
    await peer.gone.wait()

asyncio.run(main())
"""


def train(job: str, steps: int = 1) -> Train:
    return Train(job, 8, 7, [], [], 0, [], [], Teaching("sft", 1e-3, steps, "none", 0))


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[TrainerSupervisor], Awaitable[None]]], list[Asked]]:
    """With a half that has begun; what it told."""

    def played(story: Callable[[TrainerSupervisor], Awaitable[None]]) -> list[Asked]:
        told: list[Asked] = []

        async def heard(what: Asked) -> dict[str, Any]:
            told.append(what)
            return {}

        def start() -> TrainerProcess:
            return TrainerProcess([sys.executable, "-c", HALF], tmp_path / "log.txt", {})

        async def run() -> None:
            life = TrainerSupervisor(start, heard, DEADLINE_S, MOST)
            try:
                await begin(life)
                await story(life)
            finally:
                await life.end()

        asyncio.run(run())
        return told

    return played


async def begin(life: TrainerSupervisor) -> int:
    opened = await life.begin(Open({}, "", 7, [7]), 20)
    assert (opened.version, opened.parameters) == (7, 11)
    assert not life.is_gone
    return life.status()["pid"]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_job_may_take_longer_than_the_deadline_as_long_as_it_moves(play: Any) -> None:
    async def story(life: TrainerSupervisor) -> None:
        assert (await life.train(train("long", steps=10))).digest == "new"

    assert [what.step for what in play(story) if isinstance(what, JobProgress)] == [*range(1, 11)]


def test_one_that_does_not_answer_is_lost_and_nothing_of_it_is_left(play: Any) -> None:
    async def story(life: TrainerSupervisor) -> None:
        before = life.status()["pid"]
        with pytest.raises(PeerLost, match=r"did not answer to Settle in 0\.8 s") as lost:
            await life.ask(Settle(8, True))
        await life.lost(lost.value)
        assert life.is_gone
        assert not is_there(before)
        assert life.why_lost.startswith(str(lost.value))
        await life.pause()
        assert await begin(life) != before
        assert life.status()["restarts"] == 1

    play(story)


def test_one_that_stands_still_in_a_job_is_lost(play: Any) -> None:
    async def story(life: TrainerSupervisor) -> None:
        asyncio.get_running_loop().call_later(0.3, os.kill, life.status()["pid"], signal.SIGSTOP)
        with pytest.raises(PeerLost, match="did no step of a job"):
            await life.train(train("long", steps=100))

    play(story)


def test_its_last_words_are_told_and_too_many_deaths_in_a_row_end_it(play: Any) -> None:
    async def story(life: TrainerSupervisor) -> None:
        for _ in range(MOST + 1):
            with pytest.raises(PeerLost) as lost:
                await life.train(train("dies"))
            await life.lost(lost.value)
            assert life.why_lost.endswith("exit code 3; its last words")
            if life.status()["restarts"] <= MOST:
                await life.pause()
                await begin(life)
        with pytest.raises(EngineError, match=r"died 3 times in a row, and max_restarts = 2.*its last words"):
            await life.pause()
        assert life.status()["why"] == life.why_none != ""

    play(story)


def test_one_that_dies_with_nothing_to_do_is_told_of_and_not_counted(
    play: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(life: TrainerSupervisor) -> None:
        for _ in range(MOST + 1):
            os.kill(life.status()["pid"], signal.SIGKILL)
            while not life.is_gone:
                await asyncio.sleep(0.01)
            await begin(life)
        assert life.status()["restarts"] == 0
        assert life.why_lost.endswith("with nothing to do: signal 9")

    with caplog.at_level(logging.ERROR):
        play(story)
    assert sum("with nothing to do: signal 9" in record.message for record in caplog.records) == MOST + 1


def test_another_one_takes_the_place_of_one_that_lives(play: Any) -> None:
    async def story(life: TrainerSupervisor) -> None:
        before = life.status()["pid"]
        await begin(life)
        assert not is_there(before)

    play(story)
