"""Run vLLM as a child process, in its own Python environment, and bring it to a halt for a new version.

It listens on a socket file that only this user can open. Its path gets one directory with a link to this package and
nothing else, because the trainer's other packages must not become vLLM's.

RequestGate: consumes requests                waits for: the gate to be opened again
             produces a vLLM that is idle     waits for: admitted requests to end, to be aborted, or to be held

All requests go through the gate. So once it is shut and the admitted requests have ended, vLLM is idle and need not be
paused, which would take 20 ms. A held request keeps its place in vLLM and its tokens. It loses its keys and values;
vLLM recomputes them when it continues.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx

from tandem.engine.http.client import Broken, HttpClient, IncomingBody, Silent
from tandem.engine.vllm.compile_cache import ModelLink, package_path
from tandem.engine.vllm.first_cause import first_cause
from tandem.engine.vllm.options import VllmOptions
from tandem.engine.vllm.tested_versions import has_package, refuse_unknown_version, version_of
from tandem.errors import EngineError, EngineLost, SyncTimeout
from tandem.io import prestart
from tandem.io.child_process import Child
from tandem.io.engine_messages import decoded, encoded
from tandem.ops.vllm_token_protocol import SCHEDULER_TOLD
from tandem.types import OnUpdate

_log = logging.getLogger(__name__)

CONTROL_S = 60.0  # for a call that moves no weights
_POLL_S = 0.2
_ABORT_AGAIN_S = 0.1
# GiB for keys and values; threads are not pinned to cores, because other processes use them, too.
_ON_CPU = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_BASE_URL = "http://vllm"
_SERVER = "vllm.entrypoints.openai.api_server"
_IMPORTS = (_SERVER, "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner")
_SCHEDULER_FILE = "scheduler.json"
_LEAST_REQUESTS = 512  # further requests wait in this process instead of in vLLM's queue, which costs nothing
_FAULT = 500  # an answer's status from here on is vLLM's own fault
_LOG_BYTES = 2**18  # of the end of its log, which may have a long trace for each process
_SOCKET_BYTES = 100  # the kernel allows 107 for the path of a socket


class VllmProcess:
    """A process of `vllm serve`, and the calls to it."""

    def __init__(self, options: VllmOptions, home: Path, *, waits: bool = False) -> None:
        """`waits`: start before the model is known. It imports its modules, uses no GPU, and waits for `serve`."""
        self.options = options
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-vllm-")  # 0700, and its name is short
        self.socket = Path(self._folder.name) / "socket"
        if len(str(self.socket)) > _SOCKET_BYTES:
            raise EngineError(f"engine: '{self.socket}' is too long a path for a socket; set TMPDIR to a shorter path")
        self._version = version_of(options.python)
        if not options.unchecked:
            refuse_unknown_version(self._version, options.python)
        self._told = Path(self._folder.name) / "what.json"
        self._name: ModelLink | None = None
        program = ["tandem.io.prestart", str(self._told), *_IMPORTS] if waits else self._program()
        self._child = Child(
            [options.python, "-m", *program],
            ready_file=home / "vllm-ready.json",
            log=home / "vllm.log",
            environment=self.environment(Path(self._folder.name)),
        )
        self.most_requests = max(_LEAST_REQUESTS, 2 * options.max_running)
        """At a time of those that are sent together, and of those that are sent alone; urgent ones beside them."""
        self._http = HttpClient(_BASE_URL, socket=self.socket, most=self.most_requests)

    def serve(self, options: VllmOptions) -> None:
        """Let a waiting process serve. `options` may differ from the first ones in model and context only."""
        self.options = options
        prestart.tell(self._told, self._program())

    def _program(self) -> list[str]:
        if self.options.sees and not has_package(self.options.python, "torchvision"):
            raise EngineError(
                f"engine: vLLM needs torchvision for a model that sees, and {self.options.python} has none; install "
                "there the one built for its torch (on a CPU: for the CPU)"
            )
        self._name = ModelLink(self.options.model)
        return [_SERVER, *replace(self.options, model=self._name.path).arguments(self.socket, self._version)]

    @property
    def why_not_found_again(self) -> str:
        """Return why the next vLLM will not find the kernels that this one compiles; empty if it will."""
        return "no model was named" if self._name is None else self._name.why_not

    @property
    def why_not_in_bulk(self) -> str:
        """Return why its scheduler handles each request separately at each step; empty if it does not. Call it once
        ready."""
        try:
            return decoded((Path(self._folder.name) / _SCHEDULER_FILE).read_bytes())["why_not"]
        except FileNotFoundError:
            return "vLLM was told to take another scheduler"

    def environment(self, folder: Path) -> dict[str, str]:
        return {
            "PYTHONPATH": str(package_path(folder / "path")),
            SCHEDULER_TOLD: str(folder / _SCHEDULER_FILE),
            "VLLM_SERVER_DEV_MODE": "1",  # enables its control routes, which only this process can reach
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # seconds; so vLLM closes no connection that this process uses
            **(_ON_CPU if self.options.device == "cpu" else {}),
            **(_forked(os.environ) if self.options.device != "cpu" and self.options.tensor_parallel == 1 else {}),
            **(_plain_segments(os.environ) if self.options.sleeps else {}),
            **self.options.environment,
        }

    @property
    def running(self) -> bool:
        return self._child.exit_code is None

    def wait_ready(self, deadline_s: float) -> None:
        """Block until it is ready. If it ends before or takes longer, stop it and raise EngineError."""
        until = time.monotonic() + deadline_s
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url=_BASE_URL) as client:
            while time.monotonic() < until:
                if not self.running:
                    self.kill()
                    raise EngineError(f"engine: vLLM ended while it started: {self._report()}")
                try:
                    if _listens(self.socket) and client.get("/health", timeout=5.0).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # not yet
                time.sleep(_POLL_S)
        self.kill()
        raise EngineError(f"engine: vLLM was not ready within {deadline_s:g} s: {self._report()}")

    async def post(self, path: str, body: Any = None, *, deadline_s: float, **query: str) -> Any:
        """Post and return the answer's JSON. EngineLost if the process is gone, EngineError for a refusal."""
        content = None if body is None else encoded(body)
        try:
            answer = await self._http.ask("POST", path, content, within_s=deadline_s, query=query)
        except Silent as error:
            raise EngineError(f"engine: vLLM did not answer {path} within {deadline_s:g} s") from error
        except Broken as error:
            raise EngineLost(f"engine: vLLM is gone: {error}: {self._report()}") from error
        if answer.status != 200:
            raise self.refusal(path, answer.status, answer.text)
        return decoded(answer.content) if answer.kind == "application/json" else {}

    def refusal(self, what: str, status: int, text: str) -> EngineError:
        """Return the error that says how vLLM answered. Its own faults are in its log, not in its answer."""
        why = self.cause() if status >= _FAULT else ""
        return EngineError(f"engine: vLLM answers {what} with {status}: {_message(text)[:500]}{why}")

    def _report(self) -> str:
        return self._child.exit_report() + self.cause()

    def cause(self) -> str:
        """Return the last error in its log, for the end of a message; empty if there is none."""
        why = first_cause(self._child.output(_LOG_BYTES))
        return f"\n  the last error in its log:\n  {why}" if why else ""

    async def end(self) -> None:
        """End the process; its owner starts another."""
        await asyncio.to_thread(self.kill)

    def kill(self) -> None:
        self._stop(0.0)

    def _stop(self, grace_s: float = 10.0) -> None:
        self._child.stop(grace_s)
        if self._name is not None:
            self._name.close()

    @asynccontextmanager
    async def stream(self, path: str, body: Any, *, urgent: bool = False) -> AsyncIterator[IncomingBody]:
        """Post and yield the answer as a stream, without a time limit. EngineLost if the process is gone."""
        try:
            async with self._http.stream(path, encoded(body), urgent=urgent) as answer:
                yield answer
        except Broken as error:
            raise EngineLost(f"engine: vLLM is gone: {error}{self.cause()}") from error

    async def close(self) -> None:
        await self._http.close()
        await asyncio.to_thread(self._stop)
        self._folder.cleanup()


def _forked(environment: Mapping[str, str]) -> dict[str, str]:
    """Make vLLM's server fork its engine. By default it spawns it, which imports everything again: 20 s of a start.
    Tested with one GPU."""
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    return {name: environment.get(name, "fork")}


def _plain_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove expandable segments from torch's allocator options: vLLM's sleep mode does not support them."""
    changed: dict[str, str] = {}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        settings = environment.get(name, "").split(",")
        kept = [setting for setting in settings if not setting.strip().startswith("expandable_segments")]
        if kept != settings:
            changed[name] = ",".join(kept)
            _log.warning(
                "%s: expandable_segments is removed: vLLM with engine.sleep = 'free' does not support it", name
            )
    return changed


def _message(answer: str) -> str:
    """Return what vLLM says of an error; the whole answer if it has another form."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer


def _listens(path: Path) -> bool:
    """Return whether the socket accepts connections. Not with httpx, which does not close a socket that failed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


class RequestGate:
    def __init__(self, process: VllmProcess, on_update: OnUpdate) -> None:
        """`on_update`: what happens to requests in flight when the gate shuts. It waits for them (finish), aborts them
        for the caller to ask again (restart), or holds them (continue)."""
        self.on_update: OnUpdate = on_update
        self._process = process
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._vllm_paused = False
        self._running: Counter[str] = Counter()
        self._may_be_held = 0
        """How many of the running requests may be held."""

    async def opened(self) -> None:
        while not self._is_open.is_set():  # the gate may have shut again since this task was woken
            await self._is_open.wait()

    @contextmanager
    def running(self, model: str, *, may_be_held: bool) -> Iterator[None]:
        """Count an admitted request, by the model that it names."""
        self._running[model] += 1
        self._may_be_held += may_be_held
        try:
            yield
        finally:
            self._running[model] -= 1
            self._may_be_held -= may_be_held

    def is_asked(self, model: str) -> bool:
        return bool(self._running[model])

    async def shut(self, deadline_s: float, *, holds: bool = True) -> None:
        """Bring vLLM to a halt: afterwards it computes no step, and requests that did not end have no keys and values.
        A second call also halts requests that were admitted since. `holds`: whether requests may be held; otherwise
        they are waited for."""
        self._is_open.clear()
        try:
            async with asyncio.timeout(deadline_s):
                match self.on_update:
                    case "finish":
                        await self._until_none_runs()
                    case "restart":
                        await self._end_all()
                    case "continue":
                        await self._until_none_runs(but_held=holds)
        except TimeoutError as error:
            raise SyncTimeout(f"engine: running requests did not end within {deadline_s:g} s") from error
        if self._running.total():
            await self._pause("keep")

    async def _end_all(self) -> None:
        """Abort until none runs: a request that reaches a paused vLLM waits there for the end of the pause."""
        while self._running.total():
            await self._pause("abort")
            with suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_AGAIN_S):
                    await self._until_none_runs()

    async def _pause(self, mode: Literal["abort", "keep"]) -> None:
        self._vllm_paused = True  # even if the call fails
        await self._process.post("/pause", deadline_s=CONTROL_S, mode=mode, clear_cache="true")

    async def open(self) -> None:
        if self._vllm_paused:
            await self._process.post("/resume", deadline_s=CONTROL_S)
            self._vllm_paused = False
        self._is_open.set()

    async def give_up(self) -> None:
        """End the wait of all held requests with an error."""
        self._is_open.set()
        try:
            async with asyncio.timeout(CONTROL_S):
                await self._end_all()
        except (EngineError, TimeoutError):
            await self._process.end()  # otherwise vLLM would continue them with whatever weights it has

    async def _until_none_runs(self, *, but_held: bool = False) -> None:
        while self._running.total() > (self._may_be_held if but_held else 0):
            await asyncio.sleep(0.001)
