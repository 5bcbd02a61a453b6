"""An embedded engine behind a real server, on a thread of this process, and the engine that asks it over HTTP."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.bridge.inproc import InprocBridge, InprocSource
from tandem.engine.server.engine import ExistingServer, ServerEngine
from tandem.serve.engine.link_rules import Allowed
from tandem.serve.engine.service import engine_service
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import create_app
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer

_MEETINGS: dict[str, LinkedSource] = {}


class LinkedSource:
    """An inproc source that is found again by its link: for a server that shares this process."""

    carries = "live"

    def __init__(self, inner: InprocSource) -> None:
        self.inner = inner
        self.link: Mapping[str, Any] = {"mode": "shared", "meeting": uuid.uuid4().hex, "deadline_s": 10.0}
        self.reply: Mapping[str, Any] = {}
        _MEETINGS[self.link["meeting"]] = self

    def memory_for(self, tensors: Mapping[str, Any]) -> None:
        return None

    def attached(self, reply: Mapping[str, Any]) -> None:
        self.reply = reply

    def receive(self, version: int, rank: int = 0) -> Any:
        return self.inner.receive(version, rank)

    def close(self) -> None:
        pass


class LinkedBridge(InprocBridge):
    def source(self, num_receivers: int = 1) -> Any:
        return LinkedSource(super().source(num_receivers))


def open_linked(link: Mapping[str, Any]) -> LinkedSource:
    return _MEETINGS[link["meeting"]]


class ThreadServer:
    def __init__(
        self, engine: Any, *, num_ids: int, context: int = 10**6, open_source: Any = open_linked, allowed: Any = None
    ) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.listen = Listen(Path(self._directory.name))
        service = engine_service(
            engine, open_source, renderer=Renderer(byte_tokenizer()), model_id="test/tiny", context=context,
            num_ids=num_ids, allowed=allowed or Allowed(),
        )  # fmt: skip
        app = create_app(service, token=self.listen.token(), hosts=self.listen.hosts)
        self._server = Server(app, self.listen, tell=lambda _: None)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        until = time.monotonic() + 10
        while not self._server.url:
            assert time.monotonic() < until
            time.sleep(0.005)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def place(self) -> ExistingServer:
        return ExistingServer(self.url, self.listen.token_file, patience_s=0.5)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=15)
        assert not self._thread.is_alive()
        self._directory.cleanup()


class ThreadServerEngine(ServerEngine):
    """Closing it ends its server."""

    def __init__(self, engine: Any, *, num_ids: int) -> None:
        engine.version = max(engine.version, 0)  # what it has is good enough to be asked for
        self.server = ThreadServer(engine, num_ids=num_ids)
        super().__init__(self.server.place, deadline_s=10.0, shares_device=True, lease_s=30.0)

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.server.stop)
