"""A real server on a real socket, and an engine that follows a script."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai

from tandem.errors import EngineError
from tandem.protocols import OnToken
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import create_app
from tandem.serve.openai.service import openai_service
from tandem.text.renderer import Renderer
from tandem.types import Completion, Sampling, Span

MODEL = "test/tiny"
CONTEXT = 256


@dataclass
class Served:
    url: str
    token: str
    engine: Any
    renderer: Renderer

    @contextmanager
    def openai(self, **options: Any) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.token, max_retries=0, **options) as client:
            yield client

    def http(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"} | headers, timeout=30)

    def post(self, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
        with self.http() as client:
            return client.post(path, json=body)


@contextmanager
def serving(engine: Any, renderer: Renderer, data_dir: Path, **options: Any) -> Iterator[Served]:
    listen = Listen(data_dir)
    num_ids = len(renderer.tokenizer)
    given = {"model_id": MODEL, "context": CONTEXT, "num_ids": num_ids} | options
    service = openai_service(engine, renderer, **given)
    app = create_app(service, token=listen.token(), hosts=listen.hosts, body_bytes=2**20)
    server = Server(app, listen, tell=lambda _: None)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.url)
        yield Served(server.url, listen.token(), engine, renderer)
    finally:
        server.should_exit = True
        thread.join(timeout=15)
        assert not thread.is_alive()


def wait_until(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def hang_up(url: str, token: str, path: str, body: Any, *, when: Callable[[], Any], **headers: str) -> tuple[str, int]:
    """Asks, and is gone as soon as `when` is true. Returns the address that it asked from."""
    client = http.client.HTTPConnection(urlsplit(url).netloc)
    client.connect()
    asked_from = client.sock.getsockname()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"} | headers
    try:
        client.request("POST", path, json.dumps(body), headers)
        wait_until(when)
    finally:
        client.close()
    return asked_from


class ScriptedEngine:
    """Says `script` byte by byte, whatever it is asked; token i has logprob -0.1 i, and version 4 after `flip`."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.version = renderer, 3
        self.script, self.pause_s, self.flip, self.error_after = "", 0.0, 1000, 1000
        self.running, self.cancelled = 0, 0
        self.waits_at = -1
        """Before which token it waits until this is another one."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: Any = None, on_token: OnToken | None = None
    ) -> Completion:
        self.running += 1
        try:
            return await self.say(sampling, on_token)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def say(self, sampling: Sampling, on_token: OnToken | None) -> Completion:
        ids: list[int] = []
        for token_id in [*self.renderer.encode(self.script), self.renderer.end_id]:
            await asyncio.sleep(self.pause_s)
            while len(ids) == self.waits_at:
                await asyncio.sleep(0.005)
            if len(ids) == self.error_after:
                raise EngineError("engine: the script says so")
            ids.append(token_id)
            if on_token is not None:
                on_token(token_id, -0.1 * len(ids), self._version_at(len(ids) - 1))
            said = self.renderer.decode(ids)
            if len(ids) == sampling.max_tokens or any(word in said for word in sampling.stop):
                break
        stopped = ids[-1] == self.renderer.end_id or any(word in self.renderer.decode(ids) for word in sampling.stop)
        before = min(len(ids), self.flip)
        spans = [Span(3, before), *([Span(4, len(ids) - before)] if len(ids) > before else [])]
        return Completion(ids, [-0.1 * (i + 1) for i in range(len(ids))], spans, "stop" if stopped else "length")

    def _version_at(self, index: int) -> int:
        return 3 if index < self.flip else 4

    async def close(self) -> None:
        pass
