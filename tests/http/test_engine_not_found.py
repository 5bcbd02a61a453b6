"""What stands where an engine is looked for is none, or does not let in: said at once, and whose mistake it is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tandem.bridge.collective.sender import BroadcastBridge
from tandem.engine.server import connection
from tandem.engine.server.engine import ExistingServer, ServerEngine
from tandem.errors import EngineLost, SpecError
from tandem.io.token_file import read_token
from tandem.types import Sampling

SECRET = '{"password":\n"hunter2"}'
STATUS = {"boot_id": "one", "version": 0, "state": "serving", "why": ""}


@contextmanager
def answering(answer: Callable[[], tuple[int, bytes]]) -> Generator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = answer()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(url: str, token_file: Path) -> None:
    async def ask() -> None:
        engine = ServerEngine(ExistingServer(url, token_file, patience_s=0.5))
        try:
            await asyncio.wait_for(engine.generate([1], Sampling()), 20)
        finally:
            await engine.close()

    asyncio.run(ask())


def test_a_token_that_is_refused_is_the_user_s(tmp_path: Path):
    (tmp_path / "token").write_text("another\n")
    with answering(lambda: (401, b"{}")) as url, pytest.raises(SpecError, match=r"token_file = .* refuses the token"):
        asked(url, tmp_path / "token")


def test_a_token_file_that_is_not_there_is_the_user_s(tmp_path: Path):
    with pytest.raises(SpecError, match=r"engine.token_file = '.*/none'"):
        asked("http://127.0.0.1:9", tmp_path / "none")


@pytest.mark.parametrize("text", [SECRET, "", "two words", "caf\u00e9", "x" * 10 + "\x00"])
def test_what_is_no_token_is_refused_and_never_told(tmp_path: Path, text: str):
    (tmp_path / "file").write_text(text)
    with pytest.raises(SpecError, match="contains no token") as refused:
        asked("http://127.0.0.1:9", tmp_path / "file")
    assert "hunter2" not in str(refused.value)
    (tmp_path / "file").write_text(" word\n")
    assert read_token(tmp_path / "file", "x") == "word"


def test_an_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(SpecError, match=r"sync.host = '192\.0\.2\.1': the trainer cannot listen there"):
        BroadcastBridge(host="192.0.2.1").source()


def test_another_service_is_none(tmp_path: Path):
    (tmp_path / "token").write_text("word")
    with answering(lambda: (200, b"{}")) as url, pytest.raises(EngineLost, match="is not an engine of"):
        asked(url, tmp_path / "token")


def test_nobody_there_is_a_lost_engine(tmp_path: Path):
    (tmp_path / "token").write_text("word")
    with pytest.raises(EngineLost, match="none answers"):
        asked("http://127.0.0.1:9", tmp_path / "token")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}"])
def test_an_engine_that_talks_nonsense_from_now_on_is_lost(
    tmp_path: Path, body: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "BEAT_S", 0.1)
    (tmp_path / "token").write_text("word")
    said = [json.dumps(STATUS).encode()]

    async def watched() -> None:
        engine = ServerEngine(ExistingServer(url, tmp_path / "token"))
        looking = asyncio.create_task(engine.lost())
        await engine._connected()
        said[0] = body
        await asyncio.wait_for(looking, 15)
        await engine.close()

    with answering(lambda: (200, said[0])) as url:
        asyncio.run(watched())
