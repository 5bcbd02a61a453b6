"""Python programs that are forked from a process with torch and transformers imported, for tests that start many.

An import of both takes 4 s of CPU, more than most of these programs do. Within `forked_programs()`, `subprocess.Popen`
forks what would be `python -m MODULE`, `python FILE` or `python -c CODE`; every other command is executed as ever.

test's process                    the fork server, a child of it         the program
command, environment, files   ->  forks twice; the middle one ends   ->  takes files, directory, names
is its parent (a subreaper)   <-  its process id                         runs as __main__

Only the import differs from a program that is executed: it has the hash seed of the fork server, so `tandem` ranks,
which must agree whatever the order of their sets, are executed (`_EXECUTED`).
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import importlib
import inspect
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

_PRELOADED = (
    "torch", "torch.distributed", "transformers.generation.utils", "transformers.models.qwen3.modeling_qwen3",
    "tandem.recipes", "tandem.build.training", "tandem.build.standalone_engines", "tandem.engine.hf.engine",
    "tandem.train.trainer", "tandem.serve.http.run", "tandem.serve.http.service", "uvicorn", "tandem.cli.main",
)  # fmt: skip
_OF_TESTS = (
    "pytest", "typer.testing", "peft", "torch._inductor.select_algorithm", "mcp.server", "openai",
    "gymnasium", "alembic.command", "tandem.assistant.server", "tandem.control.api.service",
    "tandem.online.orchestrator", "tandem.bridge.collective.receiver", "tandem.engine.vllm.engine",
    "tandem.env.catalog",
)  # fmt: skip
"""What tests import beside that; not pandas and datasets, which start a thread."""
_EXECUTED = ("tandem.recipes.follower",)
_READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "TORCH", "PYTORCH", "OMP_", "MKL_", "OPENBLAS_", "CUDA_")
_ROOM = 16384
"""Bytes for a program's command line, and for its environment, as /proc shows them."""
_MOST_FILES, _HIGH = 16, 500
_SET_SUBREAPER, _GET_SUBREAPER = 36, 37
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
_libc = ctypes.CDLL(None)
_executing: Any = getattr(subprocess.Popen, "executing", subprocess.Popen)


def fork_workers_of_xdist() -> None:
    """Fork the workers, too: each would import for 15 s of CPU what this imports once. For pytest's first process."""
    _servers.append(_Server(_OF_TESTS))
    subprocess.Popen = _Forking  # pyright: ignore[reportAttributeAccessIssue]


def execute_again() -> None:
    """In a worker that was forked: programs are executed, but for the files that ask for `forked_programs`."""
    subprocess.Popen = _executing


@contextmanager
def forked_programs() -> Iterator[None]:
    _server()  # now: a test's deadlines are not for its imports
    before: Any = subprocess.Popen
    subprocess.Popen = _Forking  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        subprocess.Popen = before


class _Forking(_executing):
    """A Popen that forks programs of Python, from the fork server or, in a program with one thread, from itself."""

    executing = _executing

    def _execute_child(self, *given: Any) -> None:
        execute: Any = super()._execute_child  # pyright: ignore[reportAttributeAccessIssue]
        told = dict(zip(inspect.signature(execute).parameters, given, strict=True))
        program = _program(told["args"], told["env"])
        if program is None or told["shell"] or not told["close_fds"] or told["executable"] is not None:
            execute(*given)
            return
        program |= {
            "directory": os.path.abspath(told["cwd"] or "."), "session": told["start_new_session"],
            "group": told["process_group"],
        }  # fmt: skip
        ends = (told["p2cread"], told["c2pwrite"], told["errwrite"])
        files = {number: number if end == -1 else end for number, end in enumerate(ends)}
        files |= {number: number for number in told["pass_fds"]}
        if _is_program:
            if len(os.listdir("/proc/self/task")) > 1:
                execute(*given)
                return
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if self.pid == 0:
                _become(program, files, told["preexec_fn"])
        elif told["preexec_fn"] is not None:
            execute(*given)
            return
        else:
            self.pid = _server().start(program, files)
        self._child_created = True
        self._close_pipe_fds(  # pyright: ignore[reportAttributeAccessIssue]
            *(told[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


def _program(arguments: Any, environment: Mapping[str, str] | None) -> dict[str, Any] | None:
    """Return what a forked process needs to know; None for a command that is to be executed."""
    if isinstance(arguments, (str, bytes, os.PathLike)):
        return None
    words = [os.fspath(word) for word in arguments]
    env = {**(os.environ if environment is None else environment)}
    if words[0] != sys.executable or any(word in words for word in _EXECUTED):
        return None
    if any(env.get(name) != _ENVIRONMENT.get(name) for name in {*env, *_ENVIRONMENT} if _matters(name)):
        return None
    rest = words[1:]
    options = [rest.pop(0) for _ in words[1:] if rest and rest[0] in ("-P", "-I", "-u")]
    if len(rest) < 1 or (rest[0] in ("-m", "-c") and len(rest) < 2):
        return None
    if rest[0] not in ("-m", "-c") and not rest[0].endswith(".py"):
        return None
    return {"words": words, "rest": rest, "alone": bool({"-P", "-I"} & {*options}), "environment": env}


def _matters(name: str) -> bool:
    told_later = ("TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR")  # a launcher's, and what torch itself has set
    return name.startswith(_READ_AT_IMPORT) and not name.startswith(told_later)


# --- the side of the test


class _Server:
    def __init__(self, more: Sequence[str] = ()) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn = threading.Lock()
        room = {"ROOM": "x" * _ROOM}
        with theirs:
            self._process = _executing(
                [sys.executable, __file__, str(theirs.fileno()), ",".join((*_PRELOADED, *more)), "x" * _ROOM],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                env={**_ENVIRONMENT, **room},
            )  # fmt: skip
        assert self._ours.recv(100) == b"ready", "the fork server has ended"
        atexit.register(self.end)

    def start(self, program: Mapping[str, Any], files: Mapping[int, int]) -> int:
        """Return the process id of the program, a child of this process. `files`: its descriptors, and ours."""
        with self._turn, _subreaper():
            message = json.dumps({**program, "files": [*files]}).encode()
            socket.send_fds(self._ours, [message], [*files.values()])
            pid = int(self._ours.recv(100))
            assert self._ours.recv(100) == b"adopted"
        return pid

    def end(self) -> None:
        self._ours.close()
        self._process.wait()


_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
    return _servers[0]


@contextmanager
def _subreaper() -> Iterator[None]:
    """Meanwhile, a process that loses its parent becomes a child of this one."""
    before = ctypes.c_int()
    _libc.prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_SET_SUBREAPER, before.value, 0, 0, 0)


# --- the side of the fork server and its programs


_is_program = False


def _serve(ours: socket.socket, preloaded: Sequence[str]) -> None:
    """Fork programs until the test's process ends."""
    logging.disable(logging.WARNING)  # peft's packages warn of what they lack
    for name in preloaded:
        importlib.import_module(name)
    logging.disable(logging.NOTSET)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"the fork server has {len(threads)} threads, and their locks would be copied"
    ours.send(b"ready")
    while True:
        message, files, _, _ = socket.recv_fds(ours, 2**20, _MOST_FILES)
        if not message:
            return
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid == 0:
                ours.close()
                program = json.loads(message)
                _become(program, dict(zip(program["files"], files, strict=True)))
            ours.send(str(pid).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        for file in files:
            os.close(file)
        ours.send(b"adopted")


def _become(program: Mapping[str, Any], files: Mapping[int, int], before: Any = None) -> NoReturn:
    """Run the program in this process, which was forked for it, as Python runs a program; and end."""
    global _is_program
    _is_program = True
    subprocess.Popen = _Forking  # pyright: ignore[reportAttributeAccessIssue]
    try:
        if program["session"]:
            os.setsid()
        if program["group"] is not None and program["group"] >= 0:
            os.setpgid(0, program["group"])
        _take(files)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(program["directory"])
        os.environ.clear()
        os.environ.update(program["environment"])
        _show(program["words"], program["environment"])
        if os.environ.get("PYTHONFAULTHANDLER"):
            faulthandler.enable()
        if before is not None:
            before()
        code = _run(program["rest"], alone=program["alone"])
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 - as at the end of any program
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        os._exit(1)
    os._exit(code)


def _take(files: Mapping[int, int]) -> None:
    """Have these descriptors and no others."""
    high = {number: fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for number, file in files.items()}
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if number < _HIGH:
            with suppress(OSError):  # the listing's own
                os.close(number)
    for number, file in high.items():
        os.dup2(file, number)
        os.close(file)


def _show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write command line and environment to where /proc reads them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = [int(field) for field in fields[45:49]]
    told = words, [f"{name}={value}" for name, value in environment.items() if name != "ROOM"]
    for each, start, end in zip(told, places[::2], places[1::2], strict=True):
        room = end - start
        content = b"".join(os.fsencode(word) + b"\0" for word in each)[: room - 1]
        ctypes.memmove(start, content.ljust(room, b"\0"), room)


def _run(rest: Sequence[str], *, alone: bool) -> int:
    """Return the exit code."""
    kind, *arguments = rest
    sys.orig_argv = [sys.executable, *rest]
    first = "" if kind == "-c" else os.getcwd() if kind == "-m" else str(Path(kind).resolve().parent)
    given = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    if not alone:
        sys.path[:] = [first, *given, *(place for place in sys.path if place not in given)]
    try:
        if kind == "-m":
            sys.argv = arguments
            warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *arguments[1:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = [*rest]
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.path[:] = sys.path[1:]  # of this file's folder
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2].split(","))
