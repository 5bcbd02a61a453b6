"""Run a server as a child process, which ends when this process ends.

Signals go only to processes that were started here, and only through their leash (`io/leash.py`), which knows whether a
process id still belongs to the program. All calls block: use `asyncio.to_thread`.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import EngineError
from tandem.io import leash
from tandem.io.bounded_json import read_json

_POLL_S = 0.02
_KILL_S = 5.0
_LOG_TAIL_BYTES, _LOG_TAIL_LINES = 8192, 12


@dataclass(frozen=True)
class Ready:
    """The content of a service's ready file."""

    url: str
    pid: int
    token: str


class Child:
    """A child process. `command`: program and arguments; it must write `ready_file`. Its output is appended to
    `log`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        ready_file: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        name: str = "engine",
    ) -> None:
        """Start it. `environment` is added to this process's own. `name`: for errors."""
        self.command, self.ready_file, self.log, self.name = list(command), ready_file, log, name
        self._closing = threading.Lock()
        ready_file.unlink(missing_ok=True)  # an old file names a dead process, or a new one with the same pid
        log.parent.mkdir(parents=True, exist_ok=True)
        theirs, self._ours = os.pipe()
        holder = [sys.executable, "-I", leash.__file__, str(theirs), *self.command]
        with log.open("ab") as output:
            self._log_start = output.tell()
            try:
                self._leash = subprocess.Popen(
                    holder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=(theirs,),
                    start_new_session=True, env={**os.environ, **(environment or {})},
                )  # fmt: skip
            except BaseException:
                os.close(self._ours)
                raise
            finally:
                os.close(theirs)

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs. Above 128: 128 plus the signal that ended it."""
        code = self._ended_code()
        return 128 - code if code is not None and code < 0 else code

    def wait_ready(self, deadline_s: float) -> Ready:
        """Wait for the ready file. If the process ends before or takes longer, stop it and raise EngineError."""
        until = time.monotonic() + deadline_s
        try:
            while time.monotonic() < until:
                if self.exit_code is not None:
                    raise EngineError(f"{self.name}: '{self._program}' ended while it started: {self.exit_report()}")
                if (ready := self._read_ready()) is not None:
                    return ready
                time.sleep(_POLL_S)
            raise EngineError(
                f"{self.name}: '{self._program}' was not ready within {deadline_s:g} s: {self.exit_report()}"
            )
        except BaseException:
            self.stop(grace_s=0.0)
            raise

    def stop(self, grace_s: float = 10.0) -> None:
        """Send SIGTERM, wait `grace_s`, then send SIGKILL to the whole group. May be called again."""
        if self.exit_code is None:
            self._leash.terminate()
            self.ended_within(grace_s)
        with self._closing:  # two threads may stop it at once
            if self._ours >= 0:
                os.close(self._ours)
                self._ours = -1
        if not self.ended_within(_KILL_S):
            self._leash.kill()  # the leash is stopped; the kernel then kills the program
            self.ended_within(math.inf)

    def exit_report(self) -> str:
        """Return how it ended, or that it runs, with its last lines of output."""
        code = self.exit_code
        how = "still running" if code is None else f"exit code {code}" if code <= 128 else f"signal {code - 128}"
        lines = [line for line in self.output(_LOG_TAIL_BYTES).splitlines() if line.strip()]
        if not lines:
            return f"{how}; it wrote nothing to {self.log}"
        return "\n  ".join([f"{how}; the last lines of {self.log}:", *lines[-_LOG_TAIL_LINES:]])

    def output(self, most_bytes: int) -> str:
        """Return the end of its output; nothing if its file was removed, for this is asked while an error is told."""
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - most_bytes))
                return file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    @property
    def _program(self) -> str:
        return " ".join(self.command[:4])

    def ended_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._ended_code() is None:
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True

    def _ended_code(self) -> int | None:
        """Return the leash's exit code; None while it runs. If the leash is killed, the kernel kills its program, but
        not the program's children. They are killed here, while the unreaped leash still keeps the id of its session.
        """
        if self._leash.returncode is None and hasattr(os, "waitid"):
            with suppress(ChildProcessError):  # another thread has reaped it
                found = os.waitid(os.P_PID, self._leash.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None:
                    return None
                if found.si_code != os.CLD_EXITED:
                    _kill_session(self._leash.pid)
        return self._leash.poll()

    def _read_ready(self) -> Ready | None:
        if not self.ready_file.exists():
            return None
        try:
            told = read_json(self.ready_file)
            url, pid, token_file = str(told["url"]), int(told["pid"]), Path(told["token_file"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{self.name}: '{self.ready_file}' is not a valid ready file: {error!r}") from error
        if not self._is_ours(pid):
            raise EngineError(
                f"{self.name}: '{self.ready_file}' names process {pid}, which is not the one started here"
            )
        return Ready(url, pid, token_file.read_text(encoding="utf-8").strip())

    def _is_ours(self, pid: int) -> bool:
        try:
            return os.getsid(pid) == self._leash.pid
        except ProcessLookupError:
            return False


def _kill_session(session: int) -> None:
    """Send SIGKILL to every process of that session (Linux)."""
    with suppress(OSError):
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with suppress(OSError):
                if pid != session and os.getsid(pid) == session:
                    os.kill(pid, signal.SIGKILL)
