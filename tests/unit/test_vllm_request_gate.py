"""How vLLM is brought to a halt for a version: who is waited for, ended or held, and what vLLM is asked meanwhile.
With a process that only notes what it is asked; tests/vllm has the real one."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from tandem.engine.vllm.process import RequestGate
from tandem.errors import EngineError, SyncTimeout
from tandem.types import OnUpdate


class Process:
    """Ends what has reached it when it is asked to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.under_way: list[ExitStack] = []
        self.on_its_way: list[ExitStack] = []
        self.refuses = ""

    async def post(self, path: str, *, deadline_s: float, mode: str = "", **_: Any) -> None:
        self.asked.append(f"{path} {mode}".strip())
        if mode and mode == self.refuses:
            raise EngineError("engine: vLLM refuses")
        if mode == "abort":
            while self.under_way:
                self.under_way.pop().close()
            self.under_way, self.on_its_way = self.on_its_way, []

    async def end(self) -> None:
        self.asked.append("end")


def gate_of(on_update: OnUpdate) -> tuple[RequestGate, Process]:
    process = Process()
    return RequestGate(process, on_update), process  # pyright: ignore[reportArgumentType]


def let_in(gate: RequestGate, process: Process, *, may_be_held: bool = True) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(gate.running("base", may_be_held=may_be_held))
    process.under_way.append(stack)
    return stack


@pytest.mark.parametrize("on_update", ["finish", "restart", "continue"])
def test_a_vllm_in_which_nothing_runs_is_asked_nothing(on_update: OnUpdate):
    async def play() -> None:
        gate, process = gate_of(on_update)
        await gate.shut(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gate.opened(), 0.05)
        await gate.open()
        await asyncio.wait_for(gate.opened(), 0.05)
        assert process.asked == []

    asyncio.run(play())


def test_who_may_be_held_is_once_the_others_have_ended():
    async def play() -> None:
        gate, process = gate_of("continue")
        held, other = let_in(gate, process), let_in(gate, process, may_be_held=False)
        shutting = asyncio.ensure_future(gate.shut(5))
        await asyncio.sleep(0.05)
        assert not shutting.done()
        assert process.asked == []
        other.close()
        await shutting
        assert process.asked == ["/pause keep"]
        await gate.open()
        assert process.asked == ["/pause keep", "/resume"]
        held.close()
        await gate.shut(1)
        await gate.open()
        assert process.asked == ["/pause keep", "/resume"]  # nobody was left

    asyncio.run(play())


@pytest.mark.parametrize("on_update", ["finish", "continue"])
def test_who_does_not_end_in_time_is_told_of(on_update: OnUpdate):
    async def play() -> None:
        gate, process = gate_of(on_update)
        let_in(gate, process, may_be_held=on_update == "finish")
        with pytest.raises(SyncTimeout, match="did not end within"):
            await gate.shut(0.05)
        assert process.asked == []

    asyncio.run(play())


def test_who_is_held_as_it_is_given_up_is_ended():
    async def play() -> None:
        gate, process = gate_of("continue")
        let_in(gate, process)
        await gate.shut(1)
        await asyncio.wait_for(gate.give_up(), 1)
        assert process.asked == ["/pause keep", "/pause abort"]
        assert not gate.is_asked("base")
        await asyncio.wait_for(gate.opened(), 0.05)

    asyncio.run(play())


def test_a_vllm_that_does_not_end_what_is_held_is_ended_itself():
    async def play() -> None:
        gate, process = gate_of("continue")
        let_in(gate, process)
        await gate.shut(1)
        process.refuses = "abort"
        await asyncio.wait_for(gate.give_up(), 1)
        assert process.asked == ["/pause keep", "/pause abort", "end"]

    asyncio.run(play())


def test_a_vllm_that_never_says_whether_it_has_ended_what_is_held_is_ended_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tandem.engine.vllm.process.CONTROL_S", 0.05)

    async def play() -> None:
        gate, process = gate_of("continue")
        stays = let_in(gate, process)
        process.under_way.remove(stays)  # whatever is asked
        await gate.shut(1)
        await asyncio.wait_for(gate.give_up(), 1)
        assert process.asked[-1] == "end"

    asyncio.run(play())


def test_who_is_to_be_asked_again_is_ended_as_often_as_more_has_come():
    async def play() -> None:
        gate, process = gate_of("restart")
        let_in(gate, process)
        process.on_its_way.append(let_in(gate, process))
        process.under_way.remove(process.on_its_way[0])
        await gate.shut(5)
        assert process.asked == ["/pause abort"] * 2
        assert not gate.is_asked("base")

    asyncio.run(play())
