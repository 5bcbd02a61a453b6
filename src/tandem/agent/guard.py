"""`tandem agent URL`: the agent in a child process, which is started again if it is killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tandem.agent.attempt import Agent
from tandem.agent.link import Link
from tandem.errors import SpecError
from tandem.shapes.agent import TOKEN_VARIABLE

_log = logging.getLogger(__name__)
_WAIT_S = 1.0


def attend(url: str) -> int:
    """Bring the attempt at `url` to its end, in this process, with this directory as the job's; return the exit
    code."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise SpecError(f"{TOKEN_VARIABLE}: is not set; the control plane sets it when it starts an agent")
    link = Link(url, token)
    try:
        return Agent(link, Path.cwd()).run()
    finally:
        link.close()


def guard(url: str) -> int:
    """Run the agent in a child process until it ends by itself; return its exit code. SIGTERM is passed on."""
    child: subprocess.Popen[bytes] | None = None
    asked = threading.Event()

    def pass_on(*_: Any) -> None:
        asked.set()
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    while True:
        child = subprocess.Popen([sys.executable, "-P", "-m", "tandem", "agent", url, "--once"])
        if asked.is_set():
            child.send_signal(signal.SIGTERM)
        code = child.wait()
        if code >= 0 or (asked.is_set() and code == -signal.SIGTERM):  # SIGTERM before it had a handler
            return code if code >= 0 else 128 - code
        _log.warning("the agent was killed by signal %d; it is started again", -code)
        asked.wait(_WAIT_S)
