"""Requests to vLLM that are sent together: both ends over a socket, with a sampler in vLLM's place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from tandem.engine.http.client import HttpClient
from tandem.engine.vllm.process import VllmProcess
from tandem.engine.vllm.requests_together import RequestsTogether
from tandem.errors import EngineError, EngineLost
from tandem.ops.vllm_token_protocol import ABORT, TOGETHER
from tandem.vllm_worker import together_route


class Sampler:
    """Answers each request with its own tokens once it is let."""

    def __init__(self) -> None:
        self.posts, self.began, self.aborted = list[str](), list[str](), list[str]()
        self.let, self.taken = asyncio.Event(), asyncio.Event()
        self.taken.set()
        self.engine_client = SimpleNamespace(errored=False)

    async def sampled(self, _: Any, request: dict[str, Any]) -> dict[str, Any]:
        self.began.append(request["name"])
        try:
            if not request["token_ids"]:
                raise ValueError("the prompt is empty")
            if request["name"].startswith("slow"):
                await self.let.wait()
        except asyncio.CancelledError:
            self.aborted.append(request["name"])
            raise
        return {"token_ids": request["token_ids"][::-1], "finish_reason": "stop"}


class Process(VllmProcess):
    """Its calls, to a server that is in this process."""

    def __init__(self, socket: Path, most: int) -> None:
        self.most_requests = most
        self.http = self._http = HttpClient("http://vllm", socket=socket, most=most)
        self._child: Any = SimpleNamespace(
            exit_report=lambda: "it was stopped", output=lambda most: "RuntimeError: the cause"
        )


class Rig:
    def __init__(self, sampler: Sampler, server: uvicorn.Server, process: Process) -> None:
        self.sampler, self.server, self.process = sampler, server, process
        self.together = RequestsTogether(process)

    def ask(self, name: str, *ids: int) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(self.together.ask({"name": name, "token_ids": list(ids)}))

    async def until(self, *names: str) -> None:
        while not set(names) <= {*self.sampler.began}:
            await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int = 512) -> AsyncIterator[Rig]:
    sampler = Sampler()
    monkeypatch.setattr(together_route, "sampled", sampler.sampled)

    async def others(scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    middleware = together_route.TogetherRoute(others)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sampler.posts.append(scope["path"])
        scope["app"] = SimpleNamespace(state=sampler)
        if scope["path"] == TOGETHER:
            await sampler.taken.wait()
        await middleware(scope, receive, send)

    socket = tmp_path / "socket"
    server = uvicorn.Server(uvicorn.Config(app, uds=str(socket), lifespan="off", log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.001)
    rig = Rig(sampler, server, Process(socket, most))
    try:
        yield rig
    finally:
        await rig.together.close()
        await rig.process.http.close()
        server.should_exit = True
        await serving


def test_requests_of_one_moment_are_one_post_and_each_has_its_answer(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch) as rig:
            asked = {f"{number}": rig.ask(f"{number}", number, number + 1) for number in range(200)}
            for name, answer in asked.items():
                assert (await answer)["token_ids"] == [int(name) + 1, int(name)]
            assert rig.sampler.posts == [TOGETHER] * 4  # of at most 64

    asyncio.run(play())


def test_long_prompts_are_sent_with_fewer_others(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch) as rig:
            await asyncio.gather(*(rig.ask(f"{number}", *range(2**15)) for number in range(4)))
            assert rig.sampler.posts == [TOGETHER] * 2

    asyncio.run(play())


def test_an_answer_does_not_wait_for_the_others(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch) as rig:
            slow, quick = rig.ask("slow", 1), rig.ask("quick", 2)
            assert (await quick)["token_ids"] == [2]
            assert rig.sampler.posts == [TOGETHER]
            assert not slow.done()
            rig.sampler.let.set()
            assert (await slow)["finish_reason"] == "stop"

    asyncio.run(play())


def test_a_refusal_is_that_requests_alone(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch) as rig:
            bad, good = rig.ask("bad"), rig.ask("good", 3)
            with pytest.raises(EngineError, match="vLLM refuses a request: ValueError: the prompt is empty"):
                await bad
            assert (await good)["token_ids"] == [3]

    asyncio.run(play())


def test_what_is_cancelled_is_aborted_and_the_others_go_on(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch) as rig:
            dropped, kept = rig.ask("slow 1", 1), rig.ask("slow 2", 2)
            await rig.until("slow 1", "slow 2")
            dropped.cancel()
            while not rig.sampler.aborted:
                await asyncio.sleep(0.001)
            rig.sampler.let.set()
            assert (await kept)["token_ids"] == [2]
            assert rig.sampler.aborted == ["slow 1"]
            assert rig.together.under_way == 0

    asyncio.run(play())


def test_an_abort_that_overtakes_its_request_is_sent_again(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch) as rig:
            rig.sampler.taken.clear()
            dropped = rig.ask("slow", 1)
            while not rig.sampler.posts:
                await asyncio.sleep(0.001)
            dropped.cancel()
            while ABORT not in rig.sampler.posts:
                await asyncio.sleep(0.001)
            rig.sampler.taken.set()
            async with asyncio.timeout(5):
                while rig.sampler.aborted != ["slow"]:
                    await asyncio.sleep(0.001)

    asyncio.run(play())


def test_a_list_that_was_not_sent_yet_is_answered_when_the_engine_closes(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch) as rig:
            for steps in range(6):
                together = RequestsTogether(rig.process)
                asked = asyncio.create_task(together.ask({"name": f"slow {steps}", "token_ids": [1]}))
                for _ in range(steps):
                    await asyncio.sleep(0)
                await together.close()
                with pytest.raises(EngineError, match="closed"):
                    await asyncio.wait_for(asked, 5)

    asyncio.run(play())


def test_a_dead_core_is_no_refusal(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch) as rig:
            rig.sampler.engine_client.errored = True
            for each in [rig.ask("one", 1), rig.ask("two", 2)]:
                with pytest.raises(EngineLost, match=r"(?s)vLLM is gone: .*RuntimeError: the cause"):
                    await each

    asyncio.run(play())


def test_one_that_is_cancelled_before_it_is_sent_is_not_sent(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch, most=1) as rig:
            first, second, third = rig.ask("slow", 1), rig.ask("second", 2), rig.ask("third", 3)
            await rig.until("slow")
            assert rig.sampler.began == ["slow"]  # one at a time
            second.cancel()
            rig.sampler.let.set()
            assert (await first)["token_ids"] == [1]
            assert (await third)["token_ids"] == [3]
            assert rig.sampler.began == ["slow", "third"]
            assert rig.sampler.aborted == []

    asyncio.run(play())


def test_a_client_that_leaves_ends_what_it_asked_for(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch) as rig:
            asked = [rig.ask(f"slow {number}", 1) for number in range(3)]
            await rig.until("slow 0", "slow 1", "slow 2")
            await rig.together.close()
            for each in asked:
                with pytest.raises(EngineError, match="closed"):
                    await each
            while len(rig.sampler.aborted) < 3:
                await asyncio.sleep(0.001)

    asyncio.run(play())


def test_a_server_that_goes_is_told_to_all(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch) as rig:
            asked = [rig.ask(f"slow {number}", 1) for number in range(2)]
            await rig.until("slow 0", "slow 1")
            rig.server.force_exit = rig.server.should_exit = True
            for connection in list(rig.server.server_state.connections):
                connection.transport.abort()
            errors = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(each, EngineLost) and "vLLM is gone" in str(each) for each in errors)
            assert len({id(each) for each in errors}) == 2
            assert rig.together.under_way == 0

    asyncio.run(play())


def test_other_routes_are_vllms(tmp_path, monkeypatch):
    async def play() -> None:
        async with serving(tmp_path, monkeypatch) as rig:
            answer = await rig.process.http.ask("POST", "/pause", b"{}", within_s=5)
            assert (answer.status, answer.text) == (404, "/pause")

    asyncio.run(play())
