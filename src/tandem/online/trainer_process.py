"""The trainer process as a process: started with one end of a socket pair, and gone when this process is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

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
