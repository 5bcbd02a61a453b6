"""Start and end a service: its token, socket, ready file and signals."""

from __future__ import annotations

import asyncio
import faulthandler
import ipaddress
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from tandem.errors import SpecError
from tandem.io import atomic_write
from tandem.io.garbage_collector import freeze_what_is_there
from tandem.serve.http.h11_protocol import PlainHttp

_GRACE_S = 5  # for open responses to end before they are cut; with closing the service it ends within 10 s of SIGTERM
_END_S = 10.0  # from SIGTERM to the forced end of the process
_IDLE_S = 30  # for the next request on a connection; longer than Tandem's clients keep an idle one


@dataclass(frozen=True, init=False)
class Listen:
    """Where a service listens and where it keeps its state."""

    data_dir: Path
    host: str
    port: int
    """0 takes a free port; the ready file names it."""
    ready_file: Path | None
    insecure: bool
    """Whether to allow a public address without TLS."""

    def __init__(
        self,
        data_dir: str | Path,
        host: str = "127.0.0.1",
        port: int = 0,
        ready_file: str | Path | None = None,
        insecure: bool = False,
    ) -> None:
        ready = None if ready_file is None else Path(ready_file)
        given = {"data_dir": Path(data_dir), "host": host, "port": port, "ready_file": ready, "insecure": insecure}
        for name, value in given.items():
            object.__setattr__(self, name, value)
        if not (self.insecure or self.is_loopback):
            raise SpecError(
                f"--host = '{self.host}' is reachable from other machines, and the token would travel in clear text; "
                "use 127.0.0.1 behind a proxy that speaks TLS, or pass --insecure"
            )

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> frozenset[str] | None:
        return frozenset({"127.0.0.1", "localhost", "[::1]"}) if self.is_loopback else None

    @property
    def token_file(self) -> Path:
        return self.data_dir / "token"

    def token(self) -> str:
        """Return the token of this data directory; the first start creates it."""
        try:
            return self._token()
        except OSError as error:
            raise SpecError(f"--data-dir = '{self.data_dir}': cannot be written: {error}") from error

    def _token(self) -> str:
        atomic_write.make_directory(self.data_dir, mode=atomic_write.PRIVATE)
        # A token file that other users could read is replaced.
        private = self.token_file.is_file() and not self.token_file.stat().st_mode & 0o077
        if private and (token := self.token_file.read_text().strip()):
            return token
        token = secrets.token_hex(32)  # begins with no '-': people pass it as an argument
        atomic_write.write_bytes(self.token_file, token.encode(), mode=0o600)
        return token

    def clear_ready_file(self) -> None:
        """Remove an old ready file, which would send clients to a dead process, and check that a new one can be
        written."""
        if self.ready_file is None:
            return
        try:
            self.ready_file.unlink(missing_ok=True)
            with tempfile.TemporaryFile(dir=self.ready_file.parent):
                pass  # fails now rather than once the service runs
        except OSError as error:
            raise SpecError(f"--ready-file = '{self.ready_file}': cannot be written: {error}") from error


class Server(uvicorn.Server):
    def __init__(
        self, app: FastAPI, listen: Listen, tell: Callable[[str], None], http: type[asyncio.Protocol] | None = None
    ) -> None:
        """`http`: the protocol that reads requests; default: PlainHttp."""
        super().__init__(
            uvicorn.Config(
                app, http=http or PlainHttp, ws="none", lifespan="on", log_config=None, access_log=False,
                server_header=False, proxy_headers=False, timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=_IDLE_S,
            )
        )  # fmt: skip
        self.listen, self.tell, self.name = listen, tell, app.title
        self.url = ""

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        self.listen.clear_ready_file()
        if threading.current_thread() is threading.main_thread():
            # uvicorn raises the signal again after a clean end; the default handler would then kill the process.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._end)
        try:
            super().run(sockets or [self._socket()])
        finally:
            faulthandler.cancel_dump_traceback_later()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        host, port = sockets[0].getsockname()[:2]
        host = str({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if self.listen.ready_file is not None:
            ready = {"url": self.url, "pid": os.getpid(), "token_file": str(self.listen.token_file.resolve())}
            atomic_write.write_json(self.listen.ready_file, ready)
        self.tell(f"{self.name} listens at {self.url} (token in {self.listen.token_file})")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cast("FastAPI", self.config.app).state.ending()
        await super().shutdown(sockets)

    def _socket(self) -> socket.socket:
        host, port = self.listen.host, self.listen.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family, backlog=2048)
        except (OSError, OverflowError) as error:
            raise SpecError(f"--port = {port}: cannot listen on {host}: {error}; --port 0 takes a free one") from error
        # asyncio does this for sockets that it made itself. Without it the second write of an answer waits 40 ms for
        # the other side to acknowledge the first.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            # A thread in C does this without the GIL: it writes the stack of each thread, and exits.
            faulthandler.dump_traceback_later(_END_S, exit=True)
        super().handle_exit(sig, frame)

    def _end(self, *_: Any) -> None:
        self.should_exit = True


def serve_forever(
    app: FastAPI,
    listen: Listen,
    *,
    tell: Callable[[str], None] = partial(print, flush=True),  # at once: a log's last line is then why it ended
    http: type[asyncio.Protocol] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; return within 10 s after it."""
    freeze_what_is_there()  # otherwise every request is delayed again and again
    Server(app, listen, tell, http).run()
