"""Ask a program in an interpreter of its own: a line of JSON for each call, and a line for each answer."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from tandem.errors import ProviderRefused, ProviderSilent


class LineProcess:
    """A child process that answers one call after the other. It is started when it is first asked, and again after it
    has died. It ends by itself after the end of its input."""

    def __init__(self, command: tuple[str, ...], env: Mapping[str, str]) -> None:
        self._command, self._env = command, env
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._left: list[subprocess.Popen[str]] = []
        self._errors: IO[bytes]

    def ask(self, call: str, timeout_s: float, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer; ProviderSilent if there is none in time. May be called by many threads."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            line, there = "", [process.stdout]
            with suppress(BrokenPipeError):
                print(json.dumps({"call": call, **arguments}), file=process.stdin, flush=True)
                there, _, _ = select.select([process.stdout], [], [], timeout_s)
                line = process.stdout.readline() if there else ""
            if not line:
                raise ProviderSilent(
                    f"{self._command[0]} {self._leave(process, dead=bool(there), timeout_s=timeout_s)}"
                )
            return json.loads(line)

    def _running(self) -> subprocess.Popen[str]:
        self._left = [each for each in self._left if each.poll() is None]
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process writes to it
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                    env={**self._env}, text=True, cwd=self._env["HOME"],
                )  # fmt: skip
            except OSError as error:
                self._errors.close()
                raise ProviderRefused(f"python = '{self._command[0]}': cannot be started: {error.strerror}") from error
        return self._process

    def _leave(self, process: subprocess.Popen[str], *, dead: bool, timeout_s: float) -> str:
        """Return what became of it. It is asked no more: a late answer would be taken for that to the next call."""
        self._process = None
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        told = f"gave no answer within {timeout_s:g} s"
        if dead:
            process.wait()
            self._errors.seek(0)
            last = self._errors.read().decode("utf-8", "replace").strip().splitlines()
            told = f"ended with code {process.returncode}: {'; '.join(last[-2:])}"
        else:
            self._left.append(process)  # it may have something to finish
        self._errors.close()
        return told
