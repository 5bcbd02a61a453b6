"""A body that nobody will read is not read to its end, and one in crumbs is not read at all; by a raw socket."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from test_slow_bodies import CAP, CHUNKED, begun, serving, status

from tandem.serve.http import service as door

FAST = pytest.mark.parametrize("fast", [True, False], ids=["httptools", "h11"])
PIECE = b"x" * 2**16


def sent_until_closed(client: socket.socket, piece: bytes, most: int) -> int:
    size = 0
    while size < most:
        try:
            client.sendall(piece)
        except ConnectionError:
            return size
        size += len(piece)
    return size


@FAST
@pytest.mark.parametrize("headers", [(f"Content-Length: {2**30}",), CHUNKED], ids=["declared", "chunked"])
@pytest.mark.parametrize("token", ["right", "wrong"])
def test_a_large_body_that_is_refused_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: tuple[str, ...], fast: bool, token: str
) -> None:
    monkeypatch.setattr(door, "LINGER_BYTES", 2**20)
    piece = PIECE if headers is not CHUNKED else b"%x\r\n%s\r\n" % (len(PIECE), PIECE)
    with serving(tmp_path, fast=fast) as http:
        if token == "wrong":
            http.headers["authorization"] = "Bearer wrong"
        with begun(http, "/native", b"", *headers) as client:
            sent = sent_until_closed(client, piece, 2**28)
        assert sent < 2**26, "what the two sockets hold, and what the door lets pass"


@FAST
def test_the_answer_to_a_body_that_is_too_large_is_read_by_its_client(tmp_path: Path, fast: bool) -> None:
    with serving(tmp_path, fast=fast) as http, begun(http, "/native", b"", f"Content-Length: {2 * CAP}") as client:
        assert sent_until_closed(client, b"x" * 2 * CAP, 1) == 2 * CAP
        assert status(client) == 413


@FAST
def test_a_small_body_that_is_refused_costs_no_connection(tmp_path: Path, fast: bool) -> None:
    with serving(tmp_path, fast=fast) as http:
        refused = http.post("/native", content=b"{}", headers={"Authorization": "Bearer wrong"})
        assert (refused.status_code, "connection" in refused.headers) == (401, False)
        refused = http.post("/native", content=b"x" * 2**17, headers={"Authorization": "Bearer wrong"})
        assert (refused.status_code, refused.headers["connection"]) == (401, "close")


def test_a_client_that_asks_before_it_sends_is_told_not_to(tmp_path: Path) -> None:
    expects = (f"Content-Length: {2**30}", "Expect: 100-continue")
    with serving(tmp_path, fast=False) as http, begun(http, "/native", b"", *expects) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


@FAST
def test_a_body_in_crumbs_is_given_up(tmp_path: Path, fast: bool) -> None:
    with serving(tmp_path, fast=fast) as http:
        with begun(http, "/native", b"", *CHUNKED) as client:
            sent_until_closed(client, b"1\r\nx\r\n" * 2**12, 2**20)
            client.settimeout(5)
            with suppress(ConnectionResetError):
                assert client.recv(100).startswith(b"HTTP/1.1 400 ")
        pieces = (b"four" for _ in range(2_000))
        assert http.post("/native", content=pieces).json() == {"size": 8_000}
        large = (b"x" * 1000 for _ in range(1000))
        assert http.post("/native", content=large).json() == {"size": 10**6}


def test_a_405_says_what_is_allowed(tmp_path: Path) -> None:
    with serving(tmp_path) as http:
        answers: list[httpx.Response] = [http.delete("/native"), http.put("/health"), http.post("/limits", json={})]
    assert [(each.status_code, each.headers.get("allow")) for each in answers] == [
        (405, "POST"), (405, "GET"), (405, "GET"),
    ]  # fmt: skip
