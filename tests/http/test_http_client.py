"""How engines are asked: what can go wrong with it is one of two errors, and nobody else hears of it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.http import client as http
from tandem.engine.http.client import Broken, HttpClient, HttpResponse, Silent

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: 2\r\n\r\n{}"
Says = Callable[[bytes, asyncio.StreamWriter], Awaitable[Any]]


class Raw:
    """A server that says what a test wants it to, byte by byte."""

    def __init__(self, says: Says) -> None:
        self._says = says
        self.asked: list[bytes] = []
        self.connections = 0
        self.hung_up = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), b":0"
                )
                await reader.readexactly(int(length.split(b":")[1]))
                self.asked.append(head)
                await self._says(head, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hung_up.set()
        finally:
            writer.close()


@asynccontextmanager
async def asking(
    says: Says, most: int = 4, headers: dict[str, str] | None = None
) -> AsyncIterator[tuple[Raw, HttpClient]]:
    raw = Raw(says)
    server = await asyncio.start_server(raw, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", headers=headers, most=most)
    try:
        yield raw, client
    finally:
        await client.close()
        server.close()


async def streamed(client: HttpClient, *, urgent: bool = False) -> HttpResponse:
    async with client.stream("/x", b"{}", urgent=urgent) as coming:
        return await coming.whole()


def test_connections_are_kept_and_no_more_streams_are_under_way_than_may_be():
    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.01)
        writer.write(WHOLE)

    async def check() -> None:
        async with asking(says, most=2) as (raw, client):
            answers = await asyncio.gather(*(streamed(client) for _ in range(9)))
            assert {(each.status, each.kind, each.content) for each in answers} == {(200, "application/json", b"{}")}
            assert (len(raw.asked), raw.connections) == (9, 2)

    asyncio.run(check())


def test_what_is_urgent_or_short_does_not_wait_for_streams():
    """A version's own calls would come to an end when somebody's answer does."""
    open_ = asyncio.Event()

    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"POST"):
            await open_.wait()
        writer.write(WHOLE)

    async def check() -> None:
        async with asking(says, most=2) as (raw, client):
            streams = [asyncio.ensure_future(streamed(client)) for _ in range(5)]
            while len(raw.asked) < 2:
                await asyncio.sleep(0.001)
            assert (await client.ask("GET", "/x", within_s=5)).status == 200
            urgent = asyncio.ensure_future(streamed(client, urgent=True))
            while len(raw.asked) < 4:
                await asyncio.sleep(0.001)
            open_.set()
            assert [each.status for each in await asyncio.gather(urgent, *streams)] == [200] * 6

    asyncio.run(asyncio.wait_for(check(), 10))


@pytest.mark.parametrize("begun", [b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_who_says_nothing_for_too_long_is_silent(begun: bytes):
    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        await asyncio.sleep(5)

    async def check() -> None:
        async with asking(says) as (_, client):
            with pytest.raises(Silent):
                await client.ask("GET", "/x", within_s=0.1)

    asyncio.run(check())


@pytest.mark.parametrize("begun", [b"", b"220 mail.example ESMTP\r\n\r\n", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_who_hangs_up_or_speaks_something_else_is_broken(begun: bytes):
    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        writer.close()

    async def check() -> None:
        async with asking(says) as (_, client):
            with pytest.raises(Broken):
                await client.ask("POST", "/x", b"{}", within_s=5)
        nobody = HttpClient("http://127.0.0.1:9", most=1)
        with pytest.raises(Broken):
            await nobody.ask("GET", "/x", within_s=5)
        await nobody.close()

    asyncio.run(check())


def test_a_stream_comes_piece_by_piece_and_who_leaves_it_hangs_up():
    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for number in range(1000):
            writer.write(b"2\r\n%02d\r\n" % (number % 100))
            await writer.drain()
            await asyncio.sleep(0.01)

    async def check() -> None:
        async with asking(says) as (raw, client):
            async with client.stream("/x", b"{}") as answer:
                first = await anext(aiter(answer.pieces()))
            assert first.startswith(b"00")
            assert len(first) < 100
            await asyncio.wait_for(raw.hung_up.wait(), 5)

    asyncio.run(check())


def test_a_stream_that_breaks_off_is_broken():
    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n00\r\n")
        await writer.drain()
        writer.close()

    async def check() -> None:
        async with asking(says) as (_, client):
            with pytest.raises(Broken):
                async with client.stream("/x", b"{}") as answer:
                    assert [piece async for piece in answer.pieces()]

    asyncio.run(check())


def test_nobody_else_is_asked(monkeypatch: pytest.MonkeyPatch):
    """Neither a proxy of the environment nor where a redirect points to: the token is for one server."""
    others: list[bytes] = []

    async def other(head: bytes, writer: asyncio.StreamWriter) -> None:
        others.append(head)
        writer.write(WHOLE)

    async def check() -> None:
        elsewhere = await asyncio.start_server(Raw(other), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{elsewhere.sockets[0].getsockname()[1]}"
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, url)

        async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(f"HTTP/1.1 302 Found\r\nLocation: {url}/\r\nContent-Length: 0\r\n\r\n".encode())

        async with asking(says, headers={"Authorization": "Bearer t"}) as (raw, client):
            assert (await client.ask("GET", "/x", within_s=5)).status == 302
            assert b"Authorization: Bearer t" in raw.asked[0]
        elsewhere.close()

    asyncio.run(check())
    assert others == []


def test_a_large_request_comes_whole():
    heard: list[bytes] = []

    async def check() -> None:
        async def whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: 5000000\r\n" in head
            heard.append(await reader.readexactly(5_000_000))
            writer.write(WHOLE)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(whole, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", most=1)
        content = bytes(range(250)) * 20_000
        assert (await client.ask("POST", "/x", content, within_s=20)).status == 200
        assert heard == [content]
        await client.close()
        server.close()

    asyncio.run(check())


def test_headers_may_be_long_and_not_without_end():
    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        size = 60_000 if head.startswith(b"GET /long") else 80_000
        writer.write(HEAD + b"X-Policy: " + b"a" * size + b"\r\nContent-Length: 2\r\n\r\n{}")

    async def check() -> None:
        async with asking(says) as (_, client):
            assert (await client.ask("GET", "/long", within_s=5)).content == b"{}"
            with pytest.raises(Broken):
                await client.ask("GET", "/endless", within_s=5)

    asyncio.run(check())


def test_a_url_may_end_in_a_slash():
    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)

    async def check() -> None:
        raw = Raw(says)
        server = await asyncio.start_server(raw, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", most=1)
        await client.ask("GET", "/x", within_s=5)
        assert raw.asked[0].startswith(b"GET /x HTTP/1.1\r\n")
        await client.close()
        server.close()

    asyncio.run(check())


def test_who_asks_a_client_that_is_closed_or_waits_as_it_is_closed_is_told_so():
    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async def check() -> None:
        async with asking(says, most=1) as (_, client):
            asked = [asyncio.ensure_future(client.ask("GET", "/x", within_s=20)) for _ in range(3)]
            asked += [asyncio.ensure_future(streamed(client)) for _ in range(3)]
            await asyncio.sleep(0.1)
            await client.close()
            ends = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
            assert [type(each) for each in ends] == [Broken] * 6
            with pytest.raises(Broken, match="closed"):
                await client.ask("GET", "/x", within_s=5)
        unasked = HttpClient("http://127.0.0.1:9", most=1)
        await unasked.close()
        with pytest.raises(Broken, match="closed"):
            await unasked.ask("GET", "/x", within_s=5)

    asyncio.run(check())


@pytest.mark.parametrize("length", [b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", b"\r\n{}"])
def test_who_reads_a_stream_as_the_client_is_closed_is_told_so(length: bytes):
    """Left to itself aiohttp would leave it waiting."""
    begun = asyncio.Event()

    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + length)
        await asyncio.sleep(30)

    async def read(client: HttpClient) -> None:
        async with client.stream("/x", b"{}") as answer:
            async for _ in answer.pieces():
                begun.set()

    async def check() -> None:
        async with asking(says) as (_, client):
            reading = asyncio.ensure_future(read(client))
            await asyncio.wait_for(begun.wait(), 5)
            await client.close()
            with pytest.raises(Broken):
                await asyncio.wait_for(reading, 5)

    asyncio.run(check())


@pytest.mark.parametrize("turns", range(6))
def test_closing_just_as_the_end_of_a_piece_comes_is_told_as_any_other_closing(turns: int):
    """The reader is woken, and finds nothing to read and no connection; in one of these turns of the loop."""

    async def check() -> None:
        served = asyncio.get_running_loop().create_future()

        async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello")
            served.set_result(writer)

        async def read(client: HttpClient) -> None:
            async with client.stream("/x", b"{}") as coming:
                async for piece in coming.pieces():
                    read_so_far.append(piece)

        read_so_far: list[bytes] = []
        async with asking(says) as (_, client):
            reading = asyncio.create_task(read(client))
            writer = await served
            while not read_so_far:
                await asyncio.sleep(0.001)
            writer.write(b"\r\n")
            for _ in range(turns):
                await asyncio.sleep(0)
            await client.close()
            with pytest.raises(Broken):
                await asyncio.wait_for(reading, 5)

    asyncio.run(check())


def test_a_loop_that_stood_still_does_not_ask_over_a_connection_that_was_closed_meanwhile():
    """As it does while a training step is computed; only what may be repeated would be asked again."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(WHOLE)

    thread = threading.Thread(target=answer)
    thread.start()

    async def check() -> None:
        client = HttpClient(f"http://127.0.0.1:{listening.getsockname()[1]}", most=1)
        for _ in range(4):
            async with client.stream("/x", b"{}") as answer:
                assert (await answer.whole()).content == b"{}"
            time.sleep(0.1)
        await client.close()

    try:
        asyncio.run(check())
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(5)


def test_certificates_are_read_before_anybody_waits(monkeypatch: pytest.MonkeyPatch):
    """Which takes 30 ms and more."""

    async def check() -> None:
        client = HttpClient("https://127.0.0.1:9", most=1)
        monkeypatch.setattr(ssl, "create_default_context", lambda *_, **__: pytest.fail("read again"))
        with pytest.raises(Broken, match="Cannot connect"):
            await client.ask("GET", "/x", within_s=5)
        await client.close()

    asyncio.run(check())


def test_who_is_cancelled_is_cancelled():
    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async def check() -> None:
        async with asking(says) as (_, client):
            asked = asyncio.ensure_future(client.ask("GET", "/x", within_s=20))
            await asyncio.sleep(0.1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    asyncio.run(check())


def test_a_request_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch):
    """A server that was stopped: what it has not taken is not said yet, and nothing waits for its answer."""
    monkeypatch.setattr(http, "TAKEN_S", 0.3)

    async def check() -> None:
        async def nobody(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await asyncio.sleep(30)
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(nobody, "127.0.0.1", 0, limit=1024)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", most=1)
        with pytest.raises(Broken, match="did not read the request"):
            await asyncio.wait_for(client.ask("POST", "/x", b"x" * 64_000_000, within_s=0.2), 10)
        with pytest.raises(Broken):
            async with asyncio.timeout(20), client.stream("/x", b"x" * 64_000_000):
                pass
        await client.close()
        server.close()

    asyncio.run(check())


def test_a_socket_file_is_a_server_too(tmp_path: Path):
    async def says(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)

    async def check() -> None:
        raw = Raw(says)
        server = await asyncio.start_unix_server(raw, tmp_path / "s")
        client = HttpClient("http://engine", socket=tmp_path / "s", most=1)
        assert (await client.ask("POST", "/x", query={"level": "1"}, within_s=5)).content == b"{}"
        assert raw.asked[0].startswith(b"POST /x?level=1 HTTP/1.1\r\n")
        await client.close()
        server.close()

    asyncio.run(check())
