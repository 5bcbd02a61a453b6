"""Requests to the replicas of deployments: a control plane in this process, and replicas that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_replica import FakeReplica, replica, saying
from plane import TOKEN, Served, served

from tandem.control.replicas import DRAIN_MS, Replicas


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Served]:
    made = served(tmp_path)
    yield made
    made.plane.store.close()


class Names:
    """A name with revisions, each with a claimed attempt whose agent the test plays."""

    def __init__(self, plane: Served) -> None:
        self.plane, self.run = plane, plane.submit()
        self.agents: dict[int, tuple[str, str]] = {}

    def deploy(self, **more: Any) -> int:
        body = {"name": "support", "run": self.run, "step": len(self.agents) + 1, **more}
        n = self.plane.made("/api/deployments", body)["revisions"][-1]["n"]
        self.start(n)
        return n

    def start(self, n: int) -> None:
        """Do what the loop and an agent do for a revision's replica."""
        attempt, token = self.plane.open_attempt(self.plane.replica_runs()[n - 1])
        self.plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)
        self.agents[n] = attempt, token

    async def alive(self, n: int, at: FakeReplica | None) -> str:
        """Send the agent's sign of life; return what it should do."""
        attempt, token = self.agents[n]
        body = {"instance": "i", "serving": at.url if at else ""}
        told = await self.plane.ask_async("POST", f"/api/attempts/{attempt}/append", token, body)
        assert told.status_code == 200, told.text
        return told.json()["want"]

    async def ask(self, model: str = "support", **more: Any) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}
        return await self.plane.ask_async("POST", "/v1/chat/completions", TOKEN, body)

    async def shown(self) -> list[dict[str, Any]]:
        return (await self.plane.ask_async("GET", "/api/deployments/support")).json()["revisions"]


def test_an_undeployed_replica_answers_what_it_has_begun_and_then_ends(plane: Served):
    names = Names(plane)
    names.deploy()
    asked, go = asyncio.Event(), asyncio.Event()

    async def slowly(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.set()
        await go.wait()
        return 200, {"text": "whole"}

    async def play() -> None:
        async with replica(slowly) as fake:
            assert await names.alive(1, fake) == "run"
            answer = asyncio.create_task(names.ask())
            await asked.wait()
            assert (await plane.ask_async("POST", "/api/deployments/support/undeploy", body={})).status_code == 200
            assert [await names.alive(1, fake) for _ in range(3)] == ["run"] * 3
            assert (await names.ask()).status_code == 404
            go.set()
            told = await answer
            assert (told.status_code, told.json(), told.headers["x-tandem-revision"]) == (
                200, {"text": "whole"}, "support@1",
            )  # fmt: skip
            assert await names.alive(1, fake) == "stop"

    asyncio.run(play())


def test_a_replica_that_is_told_to_end_gets_no_further_request_and_waits_no_longer_than_the_drain():
    replicas = Replicas()
    replicas.seen("run", "attempt", "http://127.0.0.1:1", 0)
    with replicas.asked("run"):
        assert not replicas.may_end("run", "attempt", 0)
        assert replicas.find("run", 1) is not None
        assert not replicas.may_end("run", "attempt", DRAIN_MS)
        assert replicas.may_end("run", "attempt", DRAIN_MS + 1)
    replicas.seen("run", "attempt", "http://127.0.0.1:1", DRAIN_MS)
    assert replicas.find("run", DRAIN_MS) is None
    replicas.seen("run", "another", "http://127.0.0.1:2", DRAIN_MS)
    assert replicas.find("run", DRAIN_MS) is not None


def test_a_replica_that_cannot_be_reached_is_asked_again_where_it_is_next(plane: Served):
    names = Names(plane)
    names.deploy()

    async def play() -> None:
        async with replica(saying("gone")) as gone:
            await names.alive(1, gone)
        async with replica(saying("here")) as fake:
            answer = asyncio.create_task(names.ask())
            await asyncio.sleep(0)
            while not answer.done():
                await names.alive(1, fake)
                await asyncio.sleep(0.02)
            assert answer.result().json()["text"] == "here"

    asyncio.run(play())
