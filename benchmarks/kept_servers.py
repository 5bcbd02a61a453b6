"""Servers that are started again when they end, and a network that can be cut."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from common import children_of


class Unit:
    """A process that is started again when it ends, as systemd does."""

    def __init__(
        self, start: Callable[[], subprocess.Popen[bytes]], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._start, self.process, self._pause_s = start, process or start(), 1.0
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def kill(self, pause_s: float, *, children: bool = False) -> None:
        """Kill it, and start it again after `pause_s`."""
        self._pause_s = pause_s
        others = children_of(self.process.pid) if children else []
        for pid in (self.process.pid, *others):
            kill(pid)

    def close(self) -> None:
        self._over.set()
        self.process.kill()
        self._keeper.join()
        self.process.wait()

    def _keep(self) -> None:
        while not self._over.is_set():
            self.process.wait()
            if not self._over.wait(self._pause_s):
                self.process, self._pause_s = self._start(), 1.0


class Network:
    """A TCP proxy between the agents and the control plane."""

    def __init__(self, to: int) -> None:
        self._to, self.port = to, 0
        self._loop, self._passes = asyncio.new_event_loop(), asyncio.Event()
        self._passes.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._refuses = False
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def cut(self, seconds: float, *, breaks: bool) -> None:
        """Let nothing pass for a while. `breaks`: connections end, and new ones are refused; else all seem to hang."""

        def begin() -> None:
            self._refuses = breaks
            self._passes.clear()
            for each in self._connections if breaks else ():
                each.cancel()
            self._loop.call_later(seconds, self._passes.set)

        self._loop.call_soon_threadsafe(begin)

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._took, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _took(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._connect(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self._refuses and not self._passes.is_set():
                return
            await self._passes.wait()
            from_there, there = await asyncio.open_connection("127.0.0.1", self._to)
            writers.append(there)
            both = [asyncio.ensure_future(self._pass_on(*way)) for way in ((reader, there), (from_there, writer))]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in both:
                    each.cancel()
        except OSError:
            pass  # the control plane is away
        finally:
            for each in writers:
                each.transport.abort() if self._refuses else each.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
