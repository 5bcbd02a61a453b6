"""An HTTP client for engines: it keeps connections open, and returns responses whole or as streams.

It uses aiohttp, which needs 0.12 ms of a core per request; httpx needs 0.59 ms, and a step has hundreds of requests.
"""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx

_CLOSED = "this end was closed"
_IDLE_S = 4.0  # shorter than servers keep connections, so that none is used while the server closes it
_CONNECT_S = 10.0  # a server whose queue is full drops the first try; the kernel tries again after 1, 3 and 7 s
_AT_ONCE_BYTES = 2**20  # larger bodies are written in pieces, so that other requests can run in between
TAKEN_S = 30.0  # for a server to read a request
_HEADER_BYTES = 2**16  # of a header line; gateways add headers


class Broken(Exception):
    """The server is gone, hung up, or does not speak HTTP."""


class Silent(Exception):
    """The server is connected but sent nothing within the time limit."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    kind: str
    """The media type."""
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class IncomingBody:
    """A response whose body has not been read yet. Errors of the body are raised by its `stream`."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response, self.status, self.kind = response, response.status, response.content_type

    def header(self, name: str) -> str:
        """Return a header; empty if it is missing."""
        return self._response.headers.get(name, "")

    async def whole(self) -> HttpResponse:
        return HttpResponse(self.status, self.kind, b"".join([piece async for piece in self.pieces()]))

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            while piece := await self._response.content.readany():
                yield piece
        except RuntimeError as error:  # the connection closed between two reads
            raise aiohttp.ClientConnectionError(str(error)) from error


class HttpClient:
    """A client of one server with JSON bodies. It uses no proxy from the environment, which would see the token."""

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, socket: Path | None = None, most: int
    ) -> None:
        """`socket`: the server's socket file, if it has one. `most`: streams at a time, further ones wait; 0: any
        number. Urgent requests and those of `ask` never wait."""
        self._url, self._socket = url.rstrip("/"), socket
        self._turn = asyncio.Semaphore(most) if most else nullcontext()
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json", **(headers or {})}
        self._verify: ssl.SSLContext | bool = True
        if self._url.startswith("https:"):
            self._verify = httpx.create_ssl_context(trust_env=False)
            self._verify.set_alpn_protocols(["http/1.1"])
        self._session: aiohttp.ClientSession | None = None
        self._coming: set[aiohttp.ClientResponse] = set()
        self.closed = False

    async def ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        within_s: float,
        query: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        """Send a request and return the whole response. `within_s`: longest wait for the next byte."""
        with self._as_ours():
            try:
                async with asyncio.timeout(TAKEN_S + within_s):  # sock_read begins once the request is sent
                    response = await self._request(method, path, content, within_s, query)
            except TimeoutError as error:
                if isinstance(error, aiohttp.ClientError):
                    raise
                raise Broken("the server did not read the request") from error
            async with self._held(response):
                return await IncomingBody(response).whole()

    @asynccontextmanager
    async def stream(
        self, path: str, content: bytes | None, method: str = "POST", *, urgent: bool = False
    ) -> AsyncIterator[IncomingBody]:
        """Send a request and yield the response as a stream, without a time limit. Leaving the context hangs up."""
        for _ in range(2):  # a loop that was blocked first learns which connections were closed
            await asyncio.sleep(0)
        with self._as_ours():
            async with nullcontext() if urgent else self._turn:
                async with self._held(await self._request(method, path, content, None, None)) as response:
                    yield IncomingBody(response)

    async def close(self) -> None:
        self.closed = True
        for response in self._coming:  # closing the session alone would leave readers waiting
            response.close()
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _held(self, response: aiohttp.ClientResponse) -> AsyncIterator[aiohttp.ClientResponse]:
        self._coming.add(response)
        try:
            async with response:
                yield response
        finally:
            self._coming.discard(response)

    async def _request(
        self, method: str, path: str, content: bytes | None, within_s: float | None, query: Mapping[str, str] | None
    ) -> aiohttp.ClientResponse:
        if self.closed:
            raise Broken(_CLOSED)
        if self._session is None:  # made here, because it belongs to the running event loop
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                max_line_size=_HEADER_BYTES,
                max_field_size=_HEADER_BYTES,
            )
        try:
            return await self._session.request(
                method,
                self._url + path,
                data=content if content is None or len(content) <= _AT_ONCE_BYTES else io.BytesIO(content),
                params=query,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=None,
                    connect=_CONNECT_S,
                    sock_connect=_CONNECT_S,
                    sock_read=within_s,
                ),
            )
        except ValueError as error:  # of the URL
            raise Broken(str(error)) from error

    @contextmanager
    def _as_ours(self) -> Iterator[None]:
        try:
            yield
        except aiohttp.SocketTimeoutError as error:
            raise Silent(str(error)) from error
        except aiohttp.ClientError as error:
            raise Broken(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        except asyncio.CancelledError:  # aiohttp raises it for connections in progress when this client closes
            task = asyncio.current_task()
            if self.closed and not (task and task.cancelling()):
                raise Broken(_CLOSED) from None
            raise

    def _connector(self) -> aiohttp.BaseConnector:
        if self._socket is not None:
            return aiohttp.UnixConnector(str(self._socket), limit=0, keepalive_timeout=_IDLE_S)
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ssl=self._verify, socket_factory=_impatient)


def _impatient(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that fails when the peer stops reading; aiohttp itself would wait for ever."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TAKEN_S * 1000))
    return made
