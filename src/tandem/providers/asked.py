"""Ask a program in an interpreter of its own: a line of JSON for each call, and a line for each answer."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tandem.errors import ProviderRefused, ProviderSilent


class Asked:
    """A child process that answers one call after the other. It is started when it is first asked, and again after it
    has died. It ends by itself after the end of its input."""

    def __init__(self, command: tuple[str, ...], env: Mapping[str, str]) -> None:
        self._command, self._env = command, env
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes]

    def ask(self, call: str, timeout_s: float, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer; ProviderSilent if there is none in time. May be called by many threads."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                print(json.dumps({"call": call, **arguments}), file=process.stdin, flush=True)
                there, _, _ = select.select([process.stdout], [], [], timeout_s)
                line = process.stdout.readline() if there else ""
            except BrokenPipeError:
                line, there = "", True
            if line:
                return json.loads(line)
            self._process = None  # a late answer must not be taken for that to the next call
            process.stdin.close()
            if there:
                process.wait()
                self._errors.seek(0)
                last = self._errors.read().decode("utf-8", "replace").strip().splitlines()
                raise ProviderSilent(f"{self._command[0]} ended with code {process.returncode}: {'; '.join(last[-2:])}")
            raise ProviderSilent(f"{self._command[0]}: no answer within {timeout_s:g} s")

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process writes to it
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                    env={**self._env}, text=True, cwd=Path(self._env["HOME"]),
                )  # fmt: skip
            except OSError as error:
                raise ProviderRefused(f"python = '{self._command[0]}': cannot be started: {error.strerror}") from error
        return self._process
