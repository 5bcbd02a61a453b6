"""An engine's server on a real socket, over an engine that does what a test tells it to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from served import hang_up, wait_until

from tandem.protocols import OnToken
from tandem.serve.engine.link_rules import Allowed
from tandem.serve.engine.service import engine_service
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import create_app
from tandem.text.renderer import Renderer
from tandem.types import Completion, Sampling, Served, Span

CONTEXT = 256
LINK = {"mode": "disk", "directory": "", "deadline_s": 5.0}


class FakeEngine:
    """Says 1, 2, 3, ... `pause_s` apart, while it is awake. intact() finds it `whole` or not, load() raises `fails`."""

    receivers, stays = 1, False

    def __init__(self, version: int = 3) -> None:
        self.version, self.boot_id, self.cache_epoch = version, "boot-a", 5
        self.pause_s, self.whole, self.remembered, self.lent_bytes = 0.0, True, 0, 0
        self.why_torn = ""
        self.fails: BaseException | None = None
        self.refuses: BaseException | None = None
        self.awake, self.arrived, self.died = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.awake.set()
        self.arrived.set()
        self.running, self.cancelled, self.made, self.loads = 0, 0, 0, 0
        self.torn_at = -1
        """Of how many tokens made somebody writes into its weights."""
        self.closed = False

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: Any = None, on_token: OnToken | None = None
    ) -> Completion:
        if self.refuses is not None:
            raise self.refuses
        self.running += 1
        ids: list[int] = []
        try:
            for token_id in range(1, sampling.max_tokens + 1):
                await asyncio.sleep(self.pause_s)
                await self.awake.wait()
                ids.append(token_id)
                self.made += 1
                self.whole = self.whole and self.made != self.torn_at
                if on_token is not None:
                    on_token(token_id, -0.5, self.version)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return Completion(ids, [-0.5] * len(ids), [Span(self.version, len(ids))], "length")

    async def attach(self, source: Any) -> None:
        source.attached({"boot_id": self.boot_id, "workers": 1, "layout": {"w": ["float32", [2, 2]]}})

    async def load(self, version: int) -> Served:
        self.loads += 1
        try:
            await self.arrived.wait()
            if self.fails is not None:
                raise self.fails
            self.version, self.cache_epoch = version, self.cache_epoch + 1
            return Served(version, {"w": "00ff"}, (self.boot_id,), self.cache_epoch, {"wait": 0.25})
        finally:
            self.awake.set()

    async def sleep(self) -> None:
        self.awake.clear()

    async def wake(self) -> None:
        self.awake.set()

    async def fingerprints(self) -> Mapping[str, str]:
        return {"w": "00ff"}

    async def remember(self) -> None:
        self.remembered += 1

    async def intact(self) -> bool:
        return self.whole

    async def lost(self) -> None:
        await self.died.wait()

    async def close(self) -> None:
        self.closed = True


class FakeEnd:
    carries = "full"

    def __init__(self, link: Mapping[str, Any]) -> None:
        self.link, self.reply, self.closed = link, dict[str, Any](), False

    def attached(self, reply: Mapping[str, Any]) -> None:
        self.reply = {**reply, "handles": {"w": {"offset": 0}}}

    def close(self) -> None:
        self.closed = True


class Clock:
    """An event loop's own, which may be put ahead."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ahead_s, self._time = 0.0, loop.time

    def __call__(self) -> float:
        return self._time() + self.ahead_s


@dataclass
class EngineServed:
    url: str
    token: str
    engine: Any
    ends: list[FakeEnd]
    loop: asyncio.AbstractEventLoop
    clock: Clock
    server: Server
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.http()

    def http(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"} | headers, timeout=20)

    def post(self, name: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(f"/engine/{name}", json=body, headers=headers)

    def status(self) -> dict[str, Any]:
        return self.client.get("/engine/status").json()

    def attach(self, **more: Any) -> dict[str, Any]:
        """Who may load, sleep and wake from now on."""
        answer = self.post("attach", {"link": LINK} | more)
        assert answer.status_code == 200, answer.text
        return {"attachment": answer.json()["attachment"], "boot_id": "boot-a"}

    def soon(self, function: Any) -> None:
        """On the server's event loop."""
        self.loop.call_soon_threadsafe(function)

    def later(self, seconds: float) -> None:
        """On the server's clock: what it waits for has come so much nearer, and nobody has to sleep until it ends."""
        self.clock.ahead_s += seconds
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(10)

    def in_background(self, name: str, body: Any) -> Background:
        return Background(self, name, body)

    def hang_up(self, name: str, body: Any, when: Callable[[], Any]) -> None:
        """Asks, and is gone as soon as `when` is true; returns when the server has noticed."""
        asked_from = hang_up(self.url, self.token, f"/engine/{name}", body, when=when)
        wait_until(lambda: asked_from not in [each.client for each in list(self.server.server_state.connections)])
        asyncio.run_coroutine_threadsafe(_turns(20), self.loop).result(10)


async def _turns(count: int) -> None:
    """Of an event loop: what one task tells another, who tells a third, has come there."""
    for _ in range(count):
        await asyncio.sleep(0)


class Background(threading.Thread):
    def __init__(self, served: EngineServed, name: str, body: Any) -> None:
        super().__init__()
        self.answer: httpx.Response | None = None
        self._ask = lambda: served.post(name, body)
        self.start()

    def run(self) -> None:
        self.answer = self._ask()

    def wait(self) -> httpx.Response:
        self.join(timeout=15)
        assert self.answer is not None
        return self.answer


@contextmanager
def engine_serving(
    engine: Any, renderer: Renderer, data_dir: Path, *, open_source: Any = None, allowed: Allowed | None = None
) -> Iterator[EngineServed]:
    listen, ends, clocks = Listen(data_dir), list[Any](), list[tuple[asyncio.AbstractEventLoop, Clock]]()
    LINK["directory"] = str(data_dir / "versions")

    def open_end(link: Mapping[str, Any]) -> Any:
        ends.append((open_source or FakeEnd)(link))
        return ends[-1]

    class Watched(Server):
        async def startup(self, sockets: Any = None) -> None:
            loop = asyncio.get_running_loop()
            loop.time = Clock(loop)  # pyright: ignore[reportAttributeAccessIssue]
            clocks.append((loop, loop.time))
            await super().startup(sockets)

    service = engine_service(
        engine, open_end, renderer=renderer, model_id="test/tiny", context=CONTEXT, num_ids=300,
        allowed=allowed or Allowed(directories=(data_dir,)),
    )  # fmt: skip
    app = create_app(service, token=listen.token(), hosts=listen.hosts, body_bytes=2**20)
    server = Watched(app, listen, tell=lambda _: None)
    server.config.timeout_keep_alive = 10**6  # a clock that is put ahead hangs up on nobody
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.url)
        served = EngineServed(server.url, listen.token(), engine, ends, *clocks[0], server)
        with served.client:
            yield served
    finally:
        server.should_exit = True
        thread.join(timeout=15)
        assert not thread.is_alive()
