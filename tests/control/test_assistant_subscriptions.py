"""A client is told when a run that it subscribed to moves: over each transport, by both protocols."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import ResourceUpdatedNotification
from whole_way import Control, until

from tandem.assistant.server import mcp_server
from tandem.assistant.subscriptions import MOST_FOLLOWED

pytestmark = pytest.mark.filterwarnings("ignore:resources/(un)?subscribe is removed")  # clients with a session use them


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.toml").write_text('recipe = "rl"\n')
        (tmp_path / name / "log.txt").write_text("step 1\n")
        stands(tmp_path / name, 1)
    return tmp_path


def stands(run: Path, step: int) -> None:
    (run / "status.json").write_text(json.dumps({"state": "succeeded", "steps_done": step, "steps_total": 9}))


class Heard:
    """What a client with a session was told."""

    def __init__(self) -> None:
        self.uris, self.more = list[str](), asyncio.Event()

    async def __call__(self, message: Any) -> None:
        if isinstance(message, ResourceUpdatedNotification):
            self.uris.append(message.params.uri)
            self.more.set()

    async def next(self) -> str:
        async with asyncio.timeout(20):
            await self.more.wait()
        self.more.clear()
        return self.uris[-1]


async def stdio(stack: AsyncExitStack, runs: Path, heard: Heard, mode: Any) -> Client:
    args = ["-P", "-m", "tandem", "mcp", "--runs", str(runs)]
    there = StdioServerParameters(command=sys.executable, args=args, env=dict(os.environ))
    return await stack.enter_async_context(Client(there, message_handler=heard, mode=mode))


def played(use: Callable[[AsyncExitStack, Heard], Awaitable[None]]) -> None:
    async def play() -> None:
        async with AsyncExitStack() as stack:
            await use(stack, Heard())

    asyncio.run(play())


@pytest.mark.slow
def test_a_stream_tells_of_the_runs_that_were_asked_for_and_of_no_other(runs: Path):
    async def use(stack: AsyncExitStack, heard: Heard) -> None:
        client = await stdio(stack, runs, heard, "auto")
        status, log = (f"tandem://runs/mine/{what}" for what in ("status", "log"))
        async with client.listen(resource_subscriptions=[status, log]) as stream, asyncio.timeout(30):
            stands(runs / "other", 5)
            stands(runs / "mine", 2)
            assert (await anext(stream)).uri == status  # type: ignore[union-attr]
            found = (await client.read_resource(status)).contents[0]
            assert json.loads(found.text)["step"] == 2  # type: ignore[union-attr]
            (runs / "mine/log.txt").write_text("step 1\nstep 2\n")
            assert (await anext(stream)).uri == log  # type: ignore[union-attr]

    played(use)


@pytest.mark.slow
def test_a_session_tells_until_the_client_unsubscribes(runs: Path):
    async def use(stack: AsyncExitStack, heard: Heard) -> None:
        client = await stdio(stack, runs, heard, "legacy")
        assert client.server_capabilities.resources is not None
        assert client.server_capabilities.resources.subscribe
        status = "tandem://runs/mine/status"
        await client.subscribe_resource(status)  # pyright: ignore[reportDeprecated]
        await client.subscribe_resource(status)  # pyright: ignore[reportDeprecated]
        stands(runs / "mine", 2)
        assert await heard.next() == status
        await client.unsubscribe_resource(status)  # pyright: ignore[reportDeprecated]
        stands(runs / "mine", 3)
        await asyncio.sleep(2.5)
        assert heard.uris == [status]

    played(use)


@pytest.mark.parametrize("uri", ["tandem://runs/../status", "tandem://runs/nothing/status", "tandem://runs/mine/token"])
def test_what_is_no_resource_of_a_run_is_refused(runs: Path, uri: str):
    async def use(stack: AsyncExitStack, heard: Heard) -> None:
        client = await stack.enter_async_context(Client(mcp_server(runs), mode="legacy"))
        with pytest.raises(MCPError, match=r"there is no run|write tandem://runs/RUN"):
            await client.subscribe_resource(uri)  # pyright: ignore[reportDeprecated]

    played(use)


@pytest.mark.slow
def test_a_caller_follows_no_more_than_twenty_and_leaves_no_task_behind(runs: Path):
    for n in range(MOST_FOLLOWED):
        (runs / f"run{n}").mkdir()
        (runs / f"run{n}/spec.toml").write_text('recipe = "rl"\n')

    async def use(stack: AsyncExitStack, heard: Heard) -> None:
        server = mcp_server(runs)
        before = asyncio.all_tasks()
        for _ in range(2):
            async with Client(server, mode="legacy") as client:
                for n in range(MOST_FOLLOWED):
                    await client.subscribe_resource(f"tandem://runs/run{n}/spec")  # pyright: ignore[reportDeprecated]
                with pytest.raises(MCPError, match="at most 20 resources"):
                    await client.subscribe_resource("tandem://runs/mine/log")  # pyright: ignore[reportDeprecated]
            await asyncio.sleep(0.2)
            assert asyncio.all_tasks() == before

    played(use)


# --- a control server


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    made = Control(tmp_path_factory.mktemp("control"))
    yield made
    made.close()


async def at(control: Control, stack: AsyncExitStack, heard: Heard, key: str, mode: Any) -> Client:
    http = await stack.enter_async_context(httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60))
    there = streamable_http_client(f"http://127.0.0.1:{control.port}/mcp", http_client=http)
    return await stack.enter_async_context(Client(there, message_handler=heard, mode=mode))


async def subscribed(stack: AsyncExitStack, client: Client, uri: str, mode: str) -> Any:
    """Subscribe as a client of this protocol does; return its stream, if it has one."""
    if mode == "auto":
        return await stack.enter_async_context(client.listen(resource_subscriptions=[uri]))
    return await client.subscribe_resource(uri)  # pyright: ignore[reportDeprecated]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_control_server_tells_those_who_may_see_the_run(control: Control, mode: Any):
    run = control.submit(2)
    status = f"tandem://runs/{run}/status"
    if all(each["name"] != "other" for each in control.ask("GET", "/api/projects")["items"]):
        control.ask("POST", "/api/projects", {"name": "other"})

    async def use(stack: AsyncExitStack, heard: Heard) -> None:
        stranger = await at(control, stack, Heard(), control.key("runs:read", project="other"), mode)
        with pytest.raises(MCPError, match="there is no run"):
            await subscribed(stack, stranger, status, mode)
        client = await at(control, stack, heard, control.key("runs:read"), mode)
        stream = await subscribed(stack, client, status, mode)
        while True:
            async with asyncio.timeout(120):
                assert (await anext(stream)).uri == status if mode == "auto" else await heard.next() == status
            told = (await client.call_tool("get_run", {"run": run})).structured_content
            assert told is not None
            if told["state"] == "succeeded":
                return

    played(use)
    until(lambda: control.state(run) == "succeeded", 60)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_server_that_is_ended_does_not_wait_for_those_who_follow(control: Control, mode: Any):
    run = control.submit(1)
    status = f"tandem://runs/{run}/status"

    async def use(stack: AsyncExitStack, heard: Heard) -> float:
        client = await at(control, stack, heard, control.key("runs:read"), mode)
        await subscribed(stack, client, status, mode)
        await asyncio.sleep(1.5)  # so that a look is under way, or soon will be
        began = time.monotonic()
        control.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(control.process.wait, 60)
        return time.monotonic() - began

    took = list[float]()

    async def play() -> None:
        async with AsyncExitStack() as stack:
            took.append(await use(stack, Heard()))

    with suppress(Exception):  # the client's stream was cut off
        asyncio.run(play())
    try:
        assert took, "the server did not end"
        assert took[0] < 8  # a stream that is not ended holds the server for ten seconds
    finally:
        control.start()
