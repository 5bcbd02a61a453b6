"""Run a program that ends when its owner ends: `python leash.py OWNER_FD PROGRAM ARGUMENT...`.

The owner holds the other end of a pipe. When the pipe closes, because the owner closed it or ended in any way, this
process sends SIGTERM to the program's process group, and SIGKILL three seconds later. The program needs no code for
this. If this process is killed, the kernel kills the program (Linux). Only the standard library is imported, so it
starts in 30 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

_GRACE_S = 3.0
_SWEEP_S = 1.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Leash:
    def __init__(self, owner_fd: int, command: list[str]) -> None:
        self._owner_fd = owner_fd
        adopt_orphans()
        # Before any thread starts, because code between fork and exec must not wait for a lock. And on the main thread,
        # because the kernel sends its signal when the forking thread ends.
        die = partial(die_with, os.getpid())
        self._program = subprocess.Popen(command, process_group=0, preexec_fn=die)  # it inherits stdin
        self._unreaped = threading.Lock()  # held while signalling, so that the program's pid cannot be reused
        self._asked, self._ended = threading.Event(), threading.Event()

    def hold(self) -> NoReturn:
        """Wait for the program, then exit with its code, or with 128 plus its signal."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
        signal.signal(signal.SIGTERM, self._ask)
        threading.Thread(target=self._watch_owner, daemon=True).start()
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self._program.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._program.wait()  # an old Python on macOS: the pid might be reused within microseconds
        self._ended.set()
        with self._unreaped:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._kill_group()  # workers that it left behind
            code = self._program.wait()
            _kill_orphans()  # and processes that left its group
            os._exit(code if code >= 0 else 128 - code)

    def _ask(self, *_: Any) -> None:
        self._asked.set()
        os.kill(self._program.pid, signal.SIGTERM)

    def _watch_owner(self) -> None:
        while os.read(self._owner_fd, 1):
            pass
        with self._unreaped:
            waited_already = self._asked.is_set()  # the owner sent SIGTERM, waited, and then closed the pipe
            if not waited_already:
                self._ask()
        if not waited_already:
            self._ended.wait(_GRACE_S)
        with self._unreaped:
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # the group is empty or has only zombies
            os.killpg(self._program.pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that it can end them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _kill_orphans() -> None:
    until = time.monotonic() + _SWEEP_S
    while (left := children()) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)  # their children are adopted then


def children() -> set[int]:
    """Return the child processes of this process; empty if they cannot be read."""
    found: set[int] = set()
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                found |= {int(pid) for pid in file.read().split()}  # empty for an ended thread
    return found


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before this call
            os._exit(1)


if __name__ == "__main__":
    Leash(int(sys.argv[1]), sys.argv[2:]).hold()
