"""A server that behaves as vLLM documents, LoRA files included; and, on demand, as servers do when they go wrong.

Token i of a completion has id 10 + i. Its logprob is -1 for the base, and lower by what the adapter's B sums to: what
is really served can be told from the outside.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tandem.errors import SyncError
from tandem.ops.digest import fingerprints
from tandem.types import Weights

BASE, KEY = "org/base", "sk-very-secret-7"
Event = dict[str, Any]


@dataclass
class VllmScript:
    missing_path: str = "refuse"
    """refuse: 404, as 0.32 does. accept: 200, listed, and the base answers. unlisted: 200, and nothing else."""
    status: int = 200
    """Of completions."""
    health: int = 200
    looks: list[int] = field(default_factory=list)
    """What the next looks at its health find, before `health` counts again."""
    owned_by: str = "vllm"
    raw_logprobs: bool = False
    pause_s: float = 0.0
    events: Callable[[Event, list[Event]], Any] = lambda body, events: events
    """Changes what a completion answers: events, or bytes as they go out."""
    hang: threading.Event = field(default_factory=threading.Event)
    """Set: completions say nothing any more."""
    adapters: dict[str, str] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)
    asked: list[Event] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    running: int = 0
    connections: set[socket.socket] = field(default_factory=set)

    def models(self) -> Event:
        adapters = [{"id": name, "root": path, "parent": BASE} for name, path in self.adapters.items()]
        return {"object": "list", "data": [{"id": BASE, "owned_by": self.owned_by}, *adapters]}

    def load(self, body: Event) -> tuple[int, Any]:
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return 400, _error(f"The lora adapter '{name}' has already been loaded.")
        if not (Path(path) / "adapter_config.json").exists() and self.missing_path != "accept":
            if self.missing_path == "refuse":
                return 404, _error(f"Loading lora {name} failed: No adapter found for {path}")
            return 200, "Success"
        self.adapters[name] = path
        self.loaded.append(name)
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: Event) -> tuple[int, Any]:
        name = body["lora_name"]
        if self.adapters.pop(name, None) is None:
            return 404, _error(f"The lora adapter '{name}' cannot be found.")
        self.unloaded.append(name)
        return 200, "Success"

    def completion(self, body: Event) -> Any:
        path = self.adapters.get(body["model"], "")
        logprob = -1.0 - delta(Path(path))
        if body["top_k"] == 1 and not self.raw_logprobs:
            logprob = 0.0
        choices = [
            {
                "index": 0,
                "text": "x",
                "token_ids": [10 + i],
                "logprobs": {"token_logprobs": [logprob]},
                "finish_reason": "length" if i + 1 == body["max_tokens"] else None,
                "prompt_token_ids": None if i else body["prompt"],
            }
            for i in range(body["max_tokens"])
        ]
        return self.events(body, [{"model": body["model"], "choices": [choice]} for choice in choices])


def _error(text: str) -> Event:
    return {"error": {"message": text, "type": "BadRequestError", "code": 400}}


def delta(directory: Path) -> float:
    """What an adapter changes."""
    file = directory / "adapter_model.safetensors"
    if not file.is_file():
        return 0.0
    return sum(float(tensor.abs().sum()) for name, tensor in load_file(file).items() if "lora_B" in name)


def _handler(script: VllmScript) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            script.connections.add(self.connection)

        def finish(self) -> None:
            script.connections.discard(self.connection)
            with suppress(OSError):
                super().finish()

        def log_message(self, format: str, *args: Any) -> None: ...

        def do_GET(self) -> None:
            if self.path != "/health":
                return self._answer(200, script.models())
            self._answer(script.looks.pop(0) if script.looks else script.health, "")

        def do_POST(self) -> None:
            script.keys.append(self.headers.get("authorization", ""))
            raw = self.rfile.read(int(self.headers["content-length"]))
            body = json.loads(raw or "{}")  # empty: it was stopped as this came in
            if self.path == "/v1/load_lora_adapter":
                self._answer(*script.load(body))
            elif self.path == "/v1/unload_lora_adapter":
                self._answer(*script.unload(body))
            elif self.path == "/v1/completions":
                self._complete(body)

        def _complete(self, body: Event) -> None:
            script.asked.append(body)
            if script.status != 200:
                told = f"it failed; you sent {self.headers.get('authorization')}"
                return self._answer(script.status, _error(told), location="http://127.0.0.1:9/v1")
            if body["model"] != BASE and body["model"] not in script.adapters:
                return self._answer(404, _error(f"The model `{body['model']}` does not exist."))
            answer = script.completion(body)
            if isinstance(answer, dict):
                return self._answer(200, answer)
            script.running += 1
            try:
                self._stream(answer)
            finally:
                script.running -= 1
                self.close_connection = True

        def _stream(self, answer: Any) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("connection", "close")
            self.end_headers()
            for piece in [answer] if isinstance(answer, bytes) else [*answer, None]:
                while script.hang.is_set():
                    time.sleep(0.01)
                data = piece if isinstance(piece, bytes) else _event(piece)
                try:
                    self.wfile.write(data)
                    self.wfile.flush()
                except OSError:
                    return
                time.sleep(script.pause_s)

        def _answer(self, status: int, body: Any, **headers: str) -> None:
            data = b"" if body == "" else json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def _event(piece: Any) -> bytes:
    return f"data: {'[DONE]' if piece is None else json.dumps(piece)}\n\n".encode()


@dataclass
class Running:
    script: VllmScript
    port: int = 0

    def start(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self.script))
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        for connection in list(self.script.connections):  # as a process that ends: the kept ones too
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def start_anew(self) -> None:
        """As somebody does who restarts it: same address, and no adapter."""
        self.script.adapters.clear()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@contextmanager
def running(**options: Any) -> Iterator[Running]:
    server = Running(VllmScript(**options))
    server.start()
    try:
        yield server
    finally:
        server.script.hang.clear()
        server.stop()


class Folder:
    """The wire of files, both ends: adapters in a directory that everybody sees."""

    carries = "adapter"

    def __init__(self, directory: Path) -> None:
        self.directory, self.link = directory, {"mode": "adapter", "directory": str(directory)}
        self.sent: dict[int, Weights] = {}

    def attached(self, reply: Any) -> None:
        self.reply = reply

    def put(self, version: int, strength: float = 0.0, **tensors: torch.Tensor) -> Weights:
        path = self.directory / f"v-{version:06d}"
        path.mkdir(parents=True, exist_ok=True)
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        held = tensors or {f"{name}A.weight": torch.ones(2, 4), f"{name}B.weight": torch.full((4, 2), strength / 8)}
        save_file(held, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text("{}")
        weights = Weights(version, "adapter", lambda: iter(held.items()), expected=fingerprints(held), path=str(path))
        self.sent[version] = weights
        return weights

    def receive(self, version: int, rank: int = 0) -> Weights:
        if version not in self.sent:
            raise SyncError(f"version {version} was not sent")
        return self.sent[version]

    def memory_for(self, tensors: Any) -> None:
        return None

    def close(self) -> None: ...
