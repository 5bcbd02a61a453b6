"""Bodies that come slowly or not at all, by a raw socket: they end, and take no more room than what came of them."""

from __future__ import annotations

import gzip
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, Request
from served import wait_until

from tandem.serve.http import service as door
from tandem.serve.http.httptools_protocol import FastHttp
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import Service, create_app

CAP = 4 * 2**20  # of one body; of sixteen times that much there is room


@contextmanager
def serving(data_dir: Path, *, fast: bool = True) -> Iterator[httpx.Client]:
    router = APIRouter()

    async def size(request: Request) -> dict[str, int]:
        return {"size": len(await request.body())}

    for path in ("/native", "/theirs"):
        router.add_api_route(path, size, methods=["POST"])
    service = Service("s", router, gzip=True, patient_paths=frozenset({"/theirs"}))
    listen = Listen(data_dir)
    app = create_app(service, token=listen.token(), hosts=listen.hosts, body_bytes=CAP)
    server = Server(app, listen, tell=lambda _: None, http=FastHttp if fast else None)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.url)
        headers = {"Authorization": f"Bearer {listen.token()}", "Content-Type": "application/json"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=30) as http:
            yield http
    finally:
        server.should_exit = True
        thread.join(timeout=15)
        assert not thread.is_alive()


def begun(http: httpx.Client, path: str, body: bytes, *headers: str) -> socket.socket:
    """A post of which only `body` has gone out."""
    client = socket.create_connection((http.base_url.host, http.base_url.port))
    client.settimeout(20)
    head = [f"POST {path} HTTP/1.1", f"Host: {http.base_url.host}", f"Authorization: {http.headers['authorization']}"]
    client.sendall("\r\n".join([*head, "Content-Type: application/json", *headers, "", ""]).encode() + body)
    return client


def status(client: socket.socket) -> int:
    """Of its answer, after which the connection is closed."""
    told = b""
    while piece := client.recv(65536):
        told += piece
    found = re.match(rb"HTTP/1.1 (\d+) ", told)
    assert found, told
    return int(found[1])


GZIP = ("Content-Encoding: gzip", "Content-Length: 5000")
CHUNKED = ("Transfer-Encoding: chunked",)
PLAIN = (f"Content-Length: {CAP}",)


@pytest.mark.parametrize("fast", [True, False], ids=["httptools", "h11"])
@pytest.mark.parametrize(
    ("headers", "body"),
    [(GZIP, b"0123456789"), (CHUNKED, b"2\r\n{}\r\n"), (PLAIN, b"{")],
    ids=["gzip", "chunked", "plain"],
)
def test_stalled_bodies_do_not_keep_others_out_and_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: tuple[str, ...], body: bytes, fast: bool
):
    monkeypatch.setattr(door, "STALL_S", 2.0)
    with serving(tmp_path, fast=fast) as http, ExitStack() as open_until:
        stalled = [begun(http, path, body, *headers) for path in ("/native", "/theirs") for _ in range(16)]
        for client in stalled:
            open_until.enter_context(client)
        time.sleep(0.3)
        assert http.post("/native", content=b" " * CAP).json() == {"size": CAP}
        assert [status(client) for client in stalled] == [408] * 16 + [503] * 16


@pytest.mark.parametrize("trailer", [b"a: " + b"b" * 2**16, b"a: b\r\n" * 2**13], ids=["long", "many"])
def test_what_comes_behind_a_body_has_a_bound(tmp_path: Path, trailer: bytes):
    with serving(tmp_path) as http, begun(http, "/native", b"2\r\n{}\r\n0\r\n", *CHUNKED) as client:
        with suppress(ConnectionError):
            for _ in range(64):
                client.sendall(trailer)
                time.sleep(0.01)
        client.settimeout(5)
        with suppress(ConnectionResetError):
            assert client.recv(100).startswith(b"HTTP/1.1 400 ")
        assert http.post("/native", content=b"{}").json() == {"size": 2}
    with serving(tmp_path) as http, begun(http, "/native", b"2\r\n{}\r\n0\r\na: b\r\n\r\n", *CHUNKED) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_only_trickles_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "STALL_S", 1.8)
    monkeypatch.setattr(door, "SLOW_S", 3.0)
    with serving(tmp_path) as http, begun(http, "/native", b"0", *GZIP) as client:
        client.settimeout(0.2)
        began, told = time.monotonic(), b""
        while time.monotonic() < began + 10:
            try:
                told = client.recv(1000)
                break
            except TimeoutError:
                client.sendall(b"0")
    assert told.startswith(b"HTTP/1.1 408 ")
    assert 2.5 < time.monotonic() - began < 6


def test_a_slow_body_that_goes_on_comes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In less than what the parser collects before it hands on, and in more time than a stall may take."""
    monkeypatch.setattr(door, "STALL_S", 1.8)
    with serving(tmp_path) as http:
        pieces = (piece for piece in [b" " * 1000] * 20 if time.sleep(0.2) is None)
        assert http.post("/native", content=pieces).json() == {"size": 20_000}


@pytest.mark.parametrize("path", ["/native", "/theirs"])
def test_forty_packed_posts_at_a_time_over_a_slow_line_all_pass(tmp_path: Path, path: str):
    """2 Mbit/s for all of them: they are under way together for 2 s."""
    plain = b'{"a": "' + b"".join(b"%06x" % (n * 7919 % 2**24) for n in range(8000)) + b'"}'
    packed = gzip.compress(plain)
    pieces = [packed[at : at + 625] for at in range(0, len(packed), 625)]
    with serving(tmp_path) as http, ThreadPoolExecutor(40) as pool:
        head = {"Content-Encoding": "gzip", "Content-Length": str(len(packed))}

        def post(_: int) -> int:
            slowly = (piece for piece in pieces if time.sleep(0.1) is None)
            return httpx.post(
                f"{http.base_url}{path}", content=slowly, headers={**http.headers, **head}, timeout=30
            ).status_code

        assert list(pool.map(post, range(40))) == [200] * 40


def test_where_a_4xx_loses_groups_a_body_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "STALL_S", 5.0)
    with serving(tmp_path, fast=False) as http, ExitStack() as open_until:
        for _ in range(17):  # 15/16 of each
            open_until.enter_context(begun(http, "/native", b" " * (CAP - CAP // 16), *PLAIN))
        time.sleep(2.0)
        assert http.post("/native", content=b" " * CAP).status_code == 429
        monkeypatch.setattr(door, "ROOM_S", 0.2)
        full = http.post("/theirs", content=b" " * CAP)
        assert (full.status_code, full.headers["retry-after"]) == (507, "5")
        monkeypatch.setattr(door, "ROOM_S", 10.0)
        assert http.post("/theirs", content=b" " * CAP).status_code == 200  # once those are ended
