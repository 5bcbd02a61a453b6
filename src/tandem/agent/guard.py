"""`tandem agent URL`: the agent in a child process, which is started again if it is killed or fails."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tandem.agent.attempt import Agent
from tandem.agent.execution import LEAVES_S, remembered
from tandem.agent.link import Link
from tandem.agent.other_host import OtherHost
from tandem.errors import SpecError
from tandem.runs.job_hosts import COME_S, job_hosts
from tandem.shapes.agent import FENCED, TOKEN_VARIABLE

_log = logging.getLogger(__name__)
_WAIT_S = 1.0
_FAILURES = 6
"""So often in a row an agent may end by an error of its own; the trainer goes on meanwhile."""


def attend(url: str) -> int:
    """Bring the attempt at `url` to its end, in this process, with this directory as the job's; return the exit
    code."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise SpecError(f"{TOKEN_VARIABLE}: is not set; the control plane sets it when it starts an agent")
    link, hosts = Link(url, token), job_hosts()
    try:
        if hosts is not None and hosts.host:
            del os.environ[TOKEN_VARIABLE]  # the ranks that it starts do not get it
            return OtherHost(link, hosts).run()
        return Agent(link, Path.cwd(), hosts=hosts).run()
    finally:
        link.close()


def guard(url: str) -> int:
    """Run the agent in a child process until it has done its work; return its exit code. SIGTERM is passed on."""
    hosts = job_hosts()
    if hosts is not None and not hosts.directory.is_dir():
        _log.error(
            "host %d does not see %s: the target's directory must be on a disk of all nodes",
            hosts.host,
            hosts.directory,
        )
        time.sleep(COME_S)  # once one host has ended, the others have not long to say why
        return 2
    try:
        return _guarded(url)
    finally:
        if hosts is not None and not hosts.host:
            hosts.say_over()


def _guarded(url: str) -> int:
    child: subprocess.Popen[bytes] | None = None
    asked = threading.Event()

    def pass_on(*_: Any) -> None:
        asked.set()
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    failures = 0
    while True:
        child = subprocess.Popen([sys.executable, "-P", "-m", "tandem", "agent", url, "--once"])
        if asked.is_set():
            child.send_signal(signal.SIGTERM)
        code = _waited_for(child)
        if asked.is_set() and code == -signal.SIGTERM:  # it had no handler yet
            return 128 + signal.SIGTERM
        failures = failures + 1 if code > 0 else 0
        if code in (0, FENCED) or (code > 0 and (asked.is_set() or failures >= _FAILURES)):
            return code
        _log.warning("the agent ended with code %d; it is started again", code)
        time.sleep(_WAIT_S * 2 ** max(0, failures - 1))


def _waited_for(agent: subprocess.Popen[bytes]) -> int:
    """Return its exit code. One that stands still where its run has cost what it may is killed."""
    while True:
        try:
            return agent.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            _, limits = remembered(Path.cwd())
            if time.monotonic() > limits.leave_at + LEAVES_S / 4:
                _log.error("the agent stands still, and the run has cost what it may")
                agent.kill()
                agent.wait()
                return FENCED
