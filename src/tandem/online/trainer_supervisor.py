"""Start the trainer process, watch it, and replace it when it dies or hangs.

consumes: a way to start the process, its progress messages     waits for: its replies
produces: a trainer process that has loaded its version         an error after too many deaths in a row
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tandem.errors import EngineError, TandemError
from tandem.online.engine_supervisor import RestartBackoff
from tandem.online.messages import JobProgress, Open, RpcCall, Train, Trained, WorkerOpened
from tandem.online.rpc import ConnectionLost, Handle, RpcConnection

_log = logging.getLogger(__name__)

_STOP_S = 0.3
_CHECKS = 8  # waits that a step's deadline is split into
_TAIL_BYTES, _TAIL_LINES, _EXIT_S = 8192, 8, 1.0
LOG_BYTES = 16 * 2**20


class TrainerProcess:
    """A child process, connected by a socket pair; it exits when its end of the socket closes.

    `command` gets the descriptor of its socket as last argument. Its output is appended to `log`; a start that finds
    more than LOG_BYTES there renames the file to `<log>.1` first.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._log = log
        if log.exists() and log.stat().st_size > LOG_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))
        private = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with theirs, os.fdopen(private, "ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C signals this process only, which then ends the other
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, grace_s: float) -> None:
        """Wait until it has exited, and kill it after `grace_s`. Close the socket before: that makes it exit."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def describe_end(self) -> str:
        """Return its exit code or signal, and the last lines of its log."""
        until = time.monotonic() + _EXIT_S  # the socket closes a moment before the process is gone
        while (code := self._process.poll()) is None and time.monotonic() < until:
            time.sleep(0.02)
        how = "still running" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        with self._log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - _TAIL_BYTES))
            lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return "; ".join([how, *lines[-_TAIL_LINES:]])


@dataclass
class _RunningTrainer:
    process: TrainerProcess
    connection: RpcConnection
    opened: WorkerOpened


class TrainerSupervisor:
    def __init__(self, start: Callable[[], TrainerProcess], handle: Handle, deadline_s: float, max_losses: int) -> None:
        """`handle` serves its requests. `deadline_s`: for a reply, and for a training step. `max_losses`: how many
        losses in a row are followed by a restart."""
        self.why_lost = ""
        self.why_given_up = ""
        """Why it is not restarted any more; empty while it is."""
        self.deadline_s = deadline_s
        self._start, self._handle, self._losses = start, handle, RestartBackoff(max_losses)
        self._running: _RunningTrainer | None = None
        self._steps = 0

    @property
    def is_gone(self) -> bool:
        return self._running is None or self._running.connection.gone.is_set()

    def status(self) -> dict[str, Any]:
        running = self._running
        return {
            "alive": not self.is_gone,
            "pid": running.process.pid if running is not None and not self.is_gone else 0,
            "restarts": self._losses.count,
            "why": self.why_given_up,
            "parameters": running.opened.parameters if running is not None else 0,
        }

    async def begin(self, request: Open, deadline_s: float) -> WorkerOpened:
        """Start a new process in place of the one before, and load the version that `request` names."""
        if self._running is not None and self.is_gone:  # no request since found out
            self.why_lost = f"online: the trainer process died while it was idle: {await self._describe_end()}"
            _log.error("%s", self.why_lost)
        await self.end()
        process = await asyncio.to_thread(self._start)
        connection = RpcConnection(self._serve, "trainer process")
        await connection.start(process.socket)
        self._running = running = _RunningTrainer(process, connection, WorkerOpened(0, "", False))
        running.opened = msgspec.convert(await connection.call(request, deadline_s), WorkerOpened)
        _log.info("trainer process %d has version %d", process.pid, running.opened.version)
        return running.opened

    async def end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running.connection.close()
            await asyncio.to_thread(running.process.stop, _STOP_S)

    async def lost(self, error: TandemError) -> None:
        """Record a loss: the process died during a request, or failed it. End what is left of it."""
        dead = isinstance(error, ConnectionLost) and self._running is not None
        self.why_lost = f"{error}: {await self._describe_end()}" if dead else str(error)
        _log.error("%s", self.why_lost)
        await self.end()
        self._losses.count += 1

    async def pause(self) -> None:
        """Wait before the next start. EngineError after too many losses in a row."""
        if self._losses.exceeded:
            self.why_given_up = (
                f"online: the trainer process died {self._losses.count} times in a row, and max_restarts = "
                f"{self._losses.limit}; jobs wait until the server is restarted. The last time: {self.why_lost}"
            )
            raise EngineError(self.why_given_up)
        await self._losses.pause()

    def did_well(self) -> None:
        """A job ended: earlier losses count no more."""
        self._losses.count = 0

    async def call(self, what: RpcCall, deadline_s: float = 0.0) -> dict[str, Any]:
        """Send a request and return its reply; 0 uses the supervisor's deadline."""
        deadline_s = deadline_s or self.deadline_s
        try:
            return await self._connection.call(what, deadline_s)
        except TimeoutError:
            kind = type(what).__name__
            raise ConnectionLost(f"online: the trainer process did not reply to {kind} in {deadline_s:g} s") from None

    async def train(self, request: Train) -> Trained:
        """Train a job; the deadline holds for each step, not for the job. It is split into _CHECKS waits, so that if
        this process itself was stopped for a while, that counts as one of them."""
        reply = asyncio.ensure_future(self._connection.call(request))
        try:
            idle_checks = 0
            while idle_checks < _CHECKS:
                steps = self._steps
                done, _ = await asyncio.wait((reply,), timeout=self.deadline_s / _CHECKS)
                if done:
                    return msgspec.convert(reply.result(), Trained)
                idle_checks = idle_checks + 1 if self._steps == steps else 0
        finally:
            reply.cancel()
        raise ConnectionLost(f"online: the trainer process finished no step of a job in {self.deadline_s:g} s")

    async def _describe_end(self) -> str:
        assert self._running is not None
        return await asyncio.to_thread(self._running.process.describe_end)

    @property
    def _connection(self) -> RpcConnection:
        if self._running is None:
            raise ConnectionLost("online: there is no trainer process")
        return self._running.connection

    async def _serve(self, what: RpcCall) -> dict[str, Any]:
        self._steps += isinstance(what, JobProgress)
        return await self._handle(what)
