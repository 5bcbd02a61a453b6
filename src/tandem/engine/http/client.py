"""How engines are asked: HTTP over connections that are kept, answers whole or piece by piece.

By aiohttp: of a core, a request takes it 0.12 ms, and httpx 0.59, and a step asks hundreds of them at once.
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
_IDLE_S = 4.0  # less than servers keep them: none is used as it is being closed
_CONNECT_S = 5.0
_AT_ONCE_BYTES = 2**20  # more is written piece by piece, and others have their turn between
TAKEN_S = 30.0  # a request by its server
_HEADER_BYTES = 2**16  # a line of an answer's: gateways in between add their own


class Broken(Exception):
    """The server is gone, hung up, or does not speak HTTP."""


class Silent(Exception):
    """It is there, and said nothing for as long as was asked for."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    kind: str
    """Its media type."""
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class IncomingBody:
    """An answer whose content is yet to come. What goes wrong with it is told by the `stream` that it is of."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response, self.status, self.kind = response, response.status, response.content_type

    def header(self, name: str) -> str:
        """Empty if it has none of that name."""
        return self._response.headers.get(name, "")

    async def whole(self) -> HttpResponse:
        return HttpResponse(self.status, self.kind, b"".join([piece async for piece in self.pieces()]))

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            while piece := await self._response.content.readany():
                yield piece
        except RuntimeError as error:  # the connection went between two reads, or just as one was woken for nothing
            raise aiohttp.ClientConnectionError(str(error)) from error


class HttpClient:
    """Of one server that takes JSON. No proxy of the environment: what is asked, and the token with it, is for this
    server alone."""

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, socket: Path | None = None, most: int
    ) -> None:
        """`socket`: where it listens, if that is a file. `most`: streams at a time; later ones
        wait for one to end; 0: any number. Urgent requests and those with one short answer never wait."""
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
        """`within_s`: what it says next may be that late."""
        with self._as_ours():
            try:
                async with asyncio.timeout(TAKEN_S + within_s):  # sock_read begins when all is sent
                    response = await self._request(method, path, content, within_s, query)
            except TimeoutError as error:
                if isinstance(error, aiohttp.ClientError):
                    raise
                raise Broken("the request was not taken") from error
            async with self._held(response):
                return await IncomingBody(response).whole()

    @asynccontextmanager
    async def stream(
        self, path: str, content: bytes | None, method: str = "POST", *, urgent: bool = False
    ) -> AsyncIterator[IncomingBody]:
        """However long that takes. Who leaves before its end hangs up."""
        for _ in range(2):  # a loop that stood still hears first which connections were closed meanwhile
            await asyncio.sleep(0)
        with self._as_ours():
            async with nullcontext() if urgent else self._turn:
                async with self._held(await self._request(method, path, content, None, None)) as response:
                    yield IncomingBody(response)

    async def close(self) -> None:
        self.closed = True
        for response in self._coming:  # the session would leave who reads them waiting
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
        if self._session is None:  # it belongs to the loop that runs when it is made
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
        except asyncio.CancelledError:  # aiohttp raises it for connections that are being made while this end closes
            task = asyncio.current_task()
            if self.closed and not (task and task.cancelling()):
                raise Broken(_CLOSED) from None
            raise

    def _connector(self) -> aiohttp.BaseConnector:
        if self._socket is not None:
            return aiohttp.UnixConnector(str(self._socket), limit=0, keepalive_timeout=_IDLE_S)
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ssl=self._verify, socket_factory=_impatient)


def _impatient(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that breaks when the peer stops reading; aiohttp itself would wait without end."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TAKEN_S * 1000))
    return made
