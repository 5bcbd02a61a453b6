"""The process that loads an environment once, and forks its workers: `python -m tandem.env.forkserver`, a socket as
stdin.

consumes: orders (load, start, kill) from the process that plays       waits for: orders, and workers that end
produces: workers, each with a socket of its own to that process; how each ended

A worker that died costs a fork, not another load. The nursery runs nothing of the environment after it was loaded, so
it stays able to kill: a worker is ended together with its process group and with what it had put out of that group.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tandem.env import resource_limits
from tandem.env.load import load_environment
from tandem.env.protocol_check import their_code
from tandem.env.worker import LoadedEnvironment, work
from tandem.env.worker_messages import MAX_TEXT
from tandem.errors import EnvironmentFailed, TandemError
from tandem.io import json_frames, leash

_TICK_S = 0.25
_TAIL_BYTES = 4096
_READ_BYTES = 2**16
_PAUSE_S = 0.001  # after each look at output: 64 MB/s of it are taken, and no core for more


@dataclass
class _ForkedWorker:
    number: int
    pid: int
    output: int
    """The reading end of what it prints."""
    tail: bytes = b""
    why: str = ""
    """It was killed."""


class ForkServer:
    def __init__(self, control: socket.socket, loaded: LoadedEnvironment, memory_bytes: int) -> None:
        self._control, self._loaded, self._memory_bytes = control, loaded, memory_bytes
        self._workers: dict[int, _ForkedWorker] = {}
        """By process."""
        self._kept: set[int] = leash.children()  # what loading has started
        self._base = 0
        self._selector = selectors.DefaultSelector()
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._wake, False)
        self._woken_by = wake
        signal.signal(signal.SIGCHLD, self._noticed)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the other end closes."""
        while True:
            printed = False
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._control:
                    self._obey()
                elif key.fd == self._wake:
                    with suppress(BlockingIOError):
                        os.read(self._wake, _READ_BYTES)
                else:
                    printed = self._listen(key.data) or printed
            self._reap()
            self._count()
            if printed:
                time.sleep(_PAUSE_S)

    def _obey(self) -> None:
        try:
            frame, fds = json_frames.receive_with_fds(self._control, 1)
        except (OSError, json_frames.BadFrame):
            self._end()
            return
        if not frame:
            self._end()
        order: dict[str, Any] = json.loads(frame)
        if order["op"] == "start":
            self._start(order["worker"], fds[0])
        elif order["op"] == "kill":
            for worker in self._workers.values():
                if worker.number == order["worker"]:
                    self._kill(worker, order["why"])

    def _start(self, number: int, fd: int) -> None:
        output, printing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_worker(fd, printing, nursery)
            finally:
                os._exit(70)
        os.close(fd)
        os.close(printing)
        os.set_blocking(output, False)
        worker = self._workers[pid] = _ForkedWorker(number, pid, output)
        self._selector.register(output, selectors.EVENT_READ, worker)

    def _become_worker(self, fd: int, printing: int, nursery: int) -> None:
        os.setsid()
        leash.die_with(nursery)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        for other in (self._control.detach(), self._wake, self._woken_by, *(w.output for w in self._workers.values())):
            os.close(other)
        os.dup2(printing, 1)
        os.dup2(printing, 2)
        os.close(printing)
        resource_limits.limit_worker(self._memory_bytes)
        work(socket.socket(fileno=fd), self._loaded)

    def _listen(self, worker: _ForkedWorker) -> bool:
        try:
            piece = os.read(worker.output, _READ_BYTES)
        except BlockingIOError:
            return False
        worker.tail = (worker.tail + piece)[-_TAIL_BYTES:]
        if not piece:
            self._selector.unregister(worker.output)
        return True

    # --- ends

    def _kill(self, worker: _ForkedWorker, why: str) -> None:
        worker.why = worker.why or why
        for kill in (os.killpg, os.kill):  # it is not reaped yet, so its number is its own; it may have no group yet
            with suppress(ProcessLookupError, PermissionError):
                kill(worker.pid, signal.SIGKILL)

    def _reap(self) -> None:
        while (pid := self._dead()) is not None:
            worker = self._workers.get(pid)
            if worker is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # what it left behind; while it is not reaped, the number is its own
            _, status = os.waitpid(pid, 0)
            if worker is not None:
                del self._workers[pid]
                self._ended(worker, os.waitstatus_to_exitcode(status))

    def _dead(self) -> int | None:
        with suppress(ChildProcessError):
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return found.si_pid if found is not None else None
        return None

    def _ended(self, worker: _ForkedWorker, code: int) -> None:
        while worker.output in self._selector.get_map() and self._listen(worker):
            pass
        with suppress(KeyError, ValueError):
            self._selector.unregister(worker.output)
        os.close(worker.output)
        if code != 0:
            self._kill_strays()
        how = worker.why or (f"exit code {code}" if code >= 0 else f"signal {-code} ({_name(-code)})")
        if code != 0 and (last := _last_words(worker.tail)):
            how = "\n  ".join([f"{how}; its last words:", *last])
        with suppress(OSError):
            json_frames.send(self._control, {"op": "ended", "worker": worker.number, "how": how})

    def _kill_strays(self) -> None:
        """Processes that have left their group and lost their parent."""
        for pid in leash.children() - self._kept - self._workers.keys():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _count(self) -> None:
        """A worker that forks without end is ended before the machine is full."""
        if not self._workers:
            self._base = 0
            return
        now = sum(entry.isdigit() for entry in os.listdir("/proc")) if os.path.isdir("/proc/self") else 0
        self._base = min(self._base or now, now)
        if now - self._base < resource_limits.PROCESSES:
            return
        counts = resource_limits.count_by_group()
        for worker in self._workers.values():
            if counts.get(worker.pid, 0) > resource_limits.PROCESSES:
                self._kill(
                    worker, f"killed: it had {counts[worker.pid]} processes, and may have {resource_limits.PROCESSES}"
                )

    def _noticed(self, *_: object) -> None:
        """The pipe that wakes the loop has been written to."""

    def _end(self, *_: object) -> None:
        for worker in self._workers.values():
            self._kill(worker, "the end")
        self._kept.clear()
        self._kill_strays()
        with suppress(ChildProcessError):
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                pid = os.waitpid(-1, os.WNOHANG)[0]
                if pid == 0:
                    self._kill_strays()  # those whose parent has just died
                    time.sleep(0.01)
        os._exit(0)


def _last_words(tail: bytes) -> list[str]:
    lines = [line[:500] for line in tail.decode("utf-8", "replace").splitlines() if line.strip()]
    crash = next((index for index, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    return lines[-12:] if crash is None else lines[crash : crash + 8]  # below that stand our own calls


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "?"


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    resource_limits.limit_files()
    leash.adopt_orphans()
    order = json.loads(json_frames.receive(control))
    sys.path[:] = order["path"]
    try:
        environment = load_environment(order["name"], order["params"])
        loaded = LoadedEnvironment(environment, order["name"], order["episode_timeout_s"])
        with their_code(order["name"], "tasks('train') and tasks('eval')"):
            loaded.tasks("train")  # once, for all workers
            loaded.tasks("eval")
    except TandemError as error:
        kind = "environment" if isinstance(error, EnvironmentFailed) else "spec"
        json_frames.send(control, {"op": "refused", "kind": kind, "text": str(error)[:MAX_TEXT]})
        return
    threads = threading.active_count() - 1
    json_frames.send(control, {"op": "loaded", "demonstrates": hasattr(environment, "demonstrate"), "threads": threads})
    ForkServer(control, loaded, order["memory_bytes"]).run()


if __name__ == "__main__":
    main()
