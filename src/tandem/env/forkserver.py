"""The fork server: load an environment once and fork its worker processes. `python -m tandem.env.forkserver`.

consumes: orders (load, start, kill) by its stdin, a socket     waits for: orders, and workers that end
produces: workers, each with its own socket to the caller       and a report of how each ended

Replacing a dead worker costs a fork, not another load. The fork server runs no environment code after loading, so it
can always kill a worker, its process group, and processes that the worker moved out of that group.
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
from tandem.env.protocol_check import report_of, their_code
from tandem.env.sandbox import inside
from tandem.env.worker import LoadedEnvironment, work
from tandem.env.worker_messages import MAX_TEXT
from tandem.errors import EnvironmentFailed, TandemError
from tandem.io import json_frames, leash
from tandem.protocols import Demonstrator

_TICK_S = 0.25
_TAIL_BYTES = 4096
_READ_BYTES = 2**16
_OURS = 2  # processes of a sandbox without workers: bubblewrap's first one, and this
_HELPERS = 2  # processes below the one that is known here, of a worker in a sandbox: see env/sandbox/inside.py
_PAUSE_S = 0.001  # after each read of output: limits reading to 64 MB/s, so that output cannot take a core


@dataclass
class _ForkedWorker:
    number: int
    pid: int
    output: int
    """Read end of the pipe for its stdout and stderr."""
    tail: bytes = b""
    why: str = ""
    """Why it was killed."""


class ForkServer:
    def __init__(
        self, control: socket.socket, loaded: LoadedEnvironment, memory_bytes: int, sandbox: dict[str, Any] | None
    ) -> None:
        """`sandbox`: the arguments of `inside.become_worker`; None: workers have no sandbox."""
        self._control, self._loaded, self._memory_bytes, self._sandbox = control, loaded, memory_bytes, sandbox
        self._workers: dict[int, _ForkedWorker] = {}
        """By process id."""
        self._started_by_loading: set[int] = leash.children()  # processes that loading has started
        self._usual_processes = 0
        self._selector = selectors.DefaultSelector()
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._wake, False)
        self._wake_writer = wake
        signal.signal(signal.SIGCHLD, self._on_child_exit)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the client closes its socket."""
        while True:
            printed = False
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._control:
                    self._handle_order()
                elif key.fd == self._wake:
                    with suppress(BlockingIOError):
                        os.read(self._wake, _READ_BYTES)
                else:
                    printed = self._listen(key.data) or printed
            self._reap()
            self._limit_processes()
            if printed:
                time.sleep(_PAUSE_S)

    def _handle_order(self) -> None:
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
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_worker(fd, printing, server_pid)
            finally:
                os._exit(70)
        os.close(fd)
        os.close(printing)
        os.set_blocking(output, False)
        worker = self._workers[pid] = _ForkedWorker(number, pid, output)
        self._selector.register(output, selectors.EVENT_READ, worker)

    def _become_worker(self, fd: int, printing: int, server_pid: int) -> None:
        os.setsid()
        leash.die_with(server_pid)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        for other in (
            self._control.detach(),
            self._wake,
            self._wake_writer,
            *(w.output for w in self._workers.values()),
        ):
            os.close(other)
        os.dup2(printing, 1)
        os.dup2(printing, 2)
        os.close(printing)
        if self._sandbox is not None:
            try:
                inside.become_worker(**self._sandbox)
            except OSError as error:
                os.write(2, f"environment.sandbox: {error}\n".encode())
                raise
        resource_limits.limit_worker(self._memory_bytes, alone=self._sandbox is not None)
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
        for kill in (os.killpg, os.kill):  # not reaped, so the pid is still its own; it may have no group yet
            with suppress(ProcessLookupError, PermissionError):
                kill(worker.pid, signal.SIGKILL)

    def _reap(self) -> None:
        while (pid := self._dead()) is not None:
            worker = self._workers.get(pid)
            if worker is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # what it left behind; until it is reaped, the pid is its own
            _, status = os.waitpid(pid, 0)
            if worker is not None:
                del self._workers[pid]
                self._report_end(worker, os.waitstatus_to_exitcode(status))

    def _dead(self) -> int | None:
        with suppress(ChildProcessError):
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return found.si_pid if found is not None else None
        return None

    def _report_end(self, worker: _ForkedWorker, code: int) -> None:
        while worker.output in self._selector.get_map() and self._listen(worker):
            pass
        with suppress(KeyError, ValueError):
            self._selector.unregister(worker.output)
        os.close(worker.output)
        if code != 0:
            self._kill_strays()
        how = worker.why or (f"exit code {code}" if code >= 0 else f"signal {-code} ({_name(-code)})")
        if code != 0 and (last := _last_lines(worker.tail)):
            how = "\n  ".join([f"{how}; its last output:", *last])
        with suppress(OSError):
            json_frames.send(self._control, {"op": "ended", "worker": worker.number, "how": how})

    def _kill_strays(self) -> None:
        """Kill processes that left their group and lost their parent."""
        for pid in leash.children() - self._started_by_loading - self._workers.keys():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _limit_processes(self) -> None:
        """Kill a worker that has forked too many processes."""
        if self._sandbox is not None:
            self._limit_sandboxes()
            return
        if not self._workers:
            self._usual_processes = 0
            return
        now = sum(entry.isdigit() for entry in os.listdir("/proc")) if os.path.isdir("/proc/self") else 0
        self._usual_processes = min(self._usual_processes or now, now)
        if now - self._usual_processes < resource_limits.PROCESSES:
            return
        counts = resource_limits.count_by_group()
        for worker in self._workers.values():
            if counts.get(worker.pid, 0) > resource_limits.PROCESSES:
                self._kill(
                    worker,
                    f"killed: it had {counts[worker.pid]} processes; at most {resource_limits.PROCESSES} are allowed",
                )

    def _limit_sandboxes(self) -> None:
        """Kill a worker whose processes are too many, or together hold more memory than it may have alone."""
        alone = _OURS + len(self._started_by_loading) + (1 + _HELPERS) * len(self._workers)
        if sum(entry.isdigit() for entry in os.listdir("/proc")) <= alone:
            return  # no worker has started a process; the kernel limits each by itself
        most, most_bytes = resource_limits.PROCESSES, self._memory_bytes
        for pid, held in resource_limits.held_below(self._workers.keys()).items():
            if (count := held.processes - _HELPERS + 1) > most:
                self._kill(self._workers[pid], f"killed: it had {count} processes; at most {most} are allowed")
            elif count > 1 and held.resident_bytes > most_bytes:
                used = resource_limits.proportional_bytes(held.pids)
                if used > most_bytes:
                    text = f"killed: its {count} processes held {used / 2**30:.1f} GiB together; "
                    self._kill(self._workers[pid], text + f"environment.worker_memory_gib = {most_bytes / 2**30:g}")

    def _on_child_exit(self, *_: object) -> None:
        """Do nothing: the signal has already written to the pipe that wakes the loop."""

    def _end(self, *_: object) -> None:
        for worker in self._workers.values():
            self._kill(worker, "the end")
        self._started_by_loading.clear()
        self._kill_strays()
        with suppress(ChildProcessError):
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                pid = os.waitpid(-1, os.WNOHANG)[0]
                if pid == 0:
                    self._kill_strays()  # those that just lost their parent
                    time.sleep(0.01)
        os._exit(0)


def _last_lines(tail: bytes) -> list[str]:
    lines = [line[:500] for line in tail.decode("utf-8", "replace").splitlines() if line.strip()]
    crash = next((index for index, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    return lines[-12:] if crash is None else lines[crash : crash + 8]  # the rest is our own stack


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
    sandbox: dict[str, Any] | None = order["sandbox"]
    if sandbox is not None and (why := _close_sandbox(sandbox)):
        json_frames.send(control, {"op": "refused", "kind": "sandbox", "text": why})
        return
    try:
        environment = load_environment(order["name"], order["params"])
        loaded = LoadedEnvironment(environment, order["name"], order["episode_timeout_s"])
        with their_code(order["name"], "tasks('train') and tasks('eval')"):
            loaded.tasks("train")  # loaded once, shared by all workers
            loaded.tasks("eval")
    except TandemError as error:
        kind = "environment" if isinstance(error, EnvironmentFailed) else "spec"
        json_frames.send(control, {"op": "refused", "kind": kind, "text": str(error)[:MAX_TEXT]})
        return
    threads = threading.active_count() - 1
    told = {
        "demonstrates": isinstance(environment, Demonstrator),
        "threads": threads,
        "replies_first": getattr(environment, "replies_first", False) is True,
        "report": report_of(environment)[:MAX_TEXT],
    }
    json_frames.send(control, {"op": "loaded", **told})
    ForkServer(control, loaded, order["memory_bytes"], sandbox).run()


def _close_sandbox(sandbox: dict[str, Any]) -> str:
    """Filter system calls before the environment's code runs. Return why workers cannot have namespaces, or nothing."""
    try:
        inside.filter_calls(worker=False)
    except OSError as error:
        return str(error)
    return inside.why_not(**sandbox)


if __name__ == "__main__":
    main()
