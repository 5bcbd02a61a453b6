"""Whether the trainer process lives; and another one where it does not.

consumes: the start of a process, what it tells of its steps     waits for: its answers
produces: a half that has opened its files                       an error once too many in a row died over their work
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
from tandem.online.messages import Asked, JobProgress, Open, Train, Trained, WorkerOpened
from tandem.online.rpc import Handle, PeerLost, RpcConnection

_log = logging.getLogger(__name__)

_STOP_S = 0.3
_LOOKS = 8  # a deadline
_TAIL_BYTES, _TAIL_LINES, _END_S = 8192, 8, 1.0
_LOG_BYTES = 16 * 2**20


class TrainerProcess:
    """`command` gets the descriptor of its end as its last argument; what it prints is appended to `log`, which is
    begun again at a start that finds it large: the old one is then `<log>.1`."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._log = log
        if log.exists() and log.stat().st_size > _LOG_BYTES:
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
                start_new_session=True,  # Ctrl-C is this process's to deal with
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, grace_s: float) -> None:
        """Its socket is closed already, which ends it; killed if that takes longer."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def epitaph(self) -> str:
        """How it ended, and its last words."""
        until = time.monotonic() + _END_S  # the socket closes a moment before the process is gone
        while (code := self._process.poll()) is None and time.monotonic() < until:
            time.sleep(0.02)
        how = "it runs" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        with self._log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - _TAIL_BYTES))
            lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return "; ".join([how, *lines[-_TAIL_LINES:]])


@dataclass
class _RunningTrainer:
    process: TrainerProcess
    peer: RpcConnection
    opened: WorkerOpened


class TrainerSupervisor:
    def __init__(self, start: Callable[[], TrainerProcess], handle: Handle, deadline_s: float, most: int) -> None:
        """`handle`: what it asks. `deadline_s`: for an answer, and for a step. `most`: losses in a row."""
        self.why_lost = ""
        self.why_none = ""
        """Why there will be none any more."""
        self.deadline_s = deadline_s
        self._start, self._handle, self._losses = start, handle, RestartBackoff(most)
        self._half: _RunningTrainer | None = None
        self._steps = 0

    @property
    def is_gone(self) -> bool:
        return self._half is None or self._half.peer.gone.is_set()

    def status(self) -> dict[str, Any]:
        half = self._half
        return {
            "alive": not self.is_gone,
            "pid": half.process.pid if half is not None and not self.is_gone else 0,
            "restarts": self._losses.count,
            "why": self.why_none,
            "parameters": half.opened.parameters if half is not None else 0,
        }

    async def begin(self, asked: Open, deadline_s: float) -> WorkerOpened:
        """Another one, instead of what is left of the one before."""
        if self._half is not None and self.is_gone:  # it was not asked for anything since
            self.why_lost = f"online: the trainer process was gone, with nothing to do: {await self._epitaph()}"
            _log.error("%s", self.why_lost)
        await self.end()
        process = await asyncio.to_thread(self._start)
        peer = RpcConnection(self._heard, "trainer process")
        await peer.start(process.end)
        self._half = half = _RunningTrainer(process, peer, WorkerOpened(0, "", False))
        half.opened = msgspec.convert(await peer.ask(asked, deadline_s), WorkerOpened)
        _log.info("trainer process %d has version %d", process.pid, half.opened.version)
        return half.opened

    async def end(self) -> None:
        half, self._half = self._half, None
        if half is not None:
            await half.peer.close()
            await asyncio.to_thread(half.process.stop, _STOP_S)

    async def lost(self, error: TandemError) -> None:
        """It died over its work, or cannot go on: it is ended."""
        dead = isinstance(error, PeerLost) and self._half is not None
        self.why_lost = f"{error}: {await self._epitaph()}" if dead else str(error)
        _log.error("%s", self.why_lost)
        await self.end()
        self._losses.count += 1

    async def pause(self) -> None:
        """Before another one begins, where the disk says; EngineError if there will be none any more."""
        if self._losses.are_too_many:
            self.why_none = (
                f"online: the trainer process died {self._losses.count} times in a row, and max_restarts = "
                f"{self._losses.most}; jobs wait until the server is restarted. The last time: {self.why_lost}"
            )
            raise EngineError(self.why_none)
        await self._losses.pause()

    def did_well(self) -> None:
        """A job ended: what was lost before counts no more."""
        self._losses.count = 0

    async def ask(self, what: Asked, deadline_s: float = 0.0) -> dict[str, Any]:
        deadline_s = deadline_s or self.deadline_s
        try:
            return await self._peer.ask(what, deadline_s)
        except TimeoutError:
            kind = type(what).__name__
            raise PeerLost(f"online: the trainer process did not answer to {kind} in {deadline_s:g} s") from None

    async def train(self, asked: Train) -> Trained:
        """However long it takes, as long as it moves. Time in which this half was stopped itself counts once only."""
        answer = asyncio.ensure_future(self._peer.ask(asked))
        try:
            looks = 0
            while looks < _LOOKS:
                steps = self._steps
                done, _ = await asyncio.wait((answer,), timeout=self.deadline_s / _LOOKS)
                if done:
                    return msgspec.convert(answer.result(), Trained)
                looks = looks + 1 if self._steps == steps else 0
        finally:
            answer.cancel()
        raise PeerLost(f"online: the trainer process did no step of a job in {self.deadline_s:g} s")

    async def _epitaph(self) -> str:
        assert self._half is not None
        return await asyncio.to_thread(self._half.process.epitaph)

    @property
    def _peer(self) -> RpcConnection:
        if self._half is None:
            raise PeerLost("online: there is no trainer process")
        return self._half.peer

    async def _heard(self, what: Asked) -> dict[str, Any]:
        self._steps += isinstance(what, JobProgress)
        return await self._handle(what)
