"""One request of 16 MiB in each of ten shapes to each server, and what others notice.

`python benchmarks/rude_requests.py`. Each server is a process of its own with a small random model, or with that of
`--model DIR`. Before the first rude request, each route answers a small one, and the job that the online server began
with it ends: its samples fill the engine's KV cache, which stays. While one rude request is under way, /health is
asked every 10 ms on another connection. The figures that must hold on a quiet machine: the p99 of /health is 250 ms
at most, the server's memory grows by 256 MiB at most over what it was before the first of them, and the rude request
is answered, with no 5xx, within 2 s. Exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import note, table

SIZE = 16 * 2**20 - 4096  # beside the cap of a body, which is 16 MiB
HEALTH_MS, MEMORY_MIB, ANSWER_S = 250.0, 256.0, 2.0

Body = Callable[[Any, int], dict[str, Any]]
"""Of a route: where its texts belong. Its second argument is how many pieces the text is to be in."""


# --- ten shapes


def _words() -> str:
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(1000)]
    return " ".join(rng.choices(words, k=SIZE // 6))[:SIZE]


def _base64() -> str:
    letters = string.ascii_letters + string.digits + "+/"
    return "".join(random.Random(0).choices(letters, k=2**16)) * (SIZE // 2**16)


TEXTS: dict[str, Callable[[], str]] = {
    "one word": lambda: "a" * SIZE,
    "words": _words,
    "spaces": lambda: " " * SIZE,
    "emoji": lambda: "😀🎉" * (SIZE // 8),
    "base64": _base64,
}


@dataclass(frozen=True)
class Route:
    """`texts`: a body around texts. `beside`: a body that is in order, to which something is added."""

    path: str
    texts: Callable[[list[str]], dict[str, Any]]
    several: Callable[[int], tuple[str, dict[str, Any]]]
    beside: dict[str, Any]
    inner: str = "tools"
    """The field that takes JSON of any shape."""
    around: tuple[bytes, bytes] = (b"", b"")
    """What stands before and behind `beside` in the whole body."""


def shapes(route: Route) -> Iterator[tuple[str, str, bytes]]:
    """The name, the path and the body of each."""
    for name, text in TEXTS.items():
        yield name, route.path, _dumped(route.texts([text()]))
    count = SIZE // 64
    yield "many messages", route.path, _dumped(route.texts(["hi"] * count))[: SIZE + 4096]
    path, body = route.several(256)
    yield "many prompts", path, _dumped(body)
    yield "deep nesting", route.path, _within(route, b"[" * (SIZE // 2) + b"]" * (SIZE // 2))
    yield "wide schema", route.path, _within(route, b"[" + b"[]," * (SIZE // 3 - 1) + b"[]]")
    odd = b'{"a":1e300,"b":"%s"},' % (b"x" * 20)
    yield "odd fields", route.path, _added(route.beside, "surprise", b"[" + odd * (SIZE // len(odd)) + b"1]")


def _dumped(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _within(route: Route, schema: bytes) -> bytes:
    if route.inner != "tools":
        before, behind = route.around
        return before + _added(route.beside, route.inner, b'{"x":%s}' % schema) + behind
    tool = b'[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":%s}}}]' % schema
    return _added(route.beside, "tools", tool)


def _added(body: dict[str, Any], name: str, value: bytes) -> bytes:
    return _dumped(body)[:-1] + b',"%s":%s}' % (name.encode(), value)


# --- routes


def _chat(model: str) -> Route:
    def texts(texts: list[str]) -> dict[str, Any]:
        messages = [{"role": "user", "content": text} for text in texts]
        return {"model": model, "max_tokens": 4, "messages": messages}

    def several(count: int) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {"model": model, "max_tokens": 4, "prompt": [_piece(count)] * count}

    return Route("/v1/chat/completions", texts, several, texts(["hi"]))


def _generate() -> Route:
    """The gateway's, in SGLang's form."""

    def texts(texts: list[str]) -> dict[str, Any]:
        return {"text": texts, "sampling_params": {"max_new_tokens": 4}}

    return Route("/generate", texts, lambda n: ("/generate", texts([_piece(n)] * n)), texts(["hi"]), "sampling_params")


def _train() -> Route:
    def texts(texts: list[str]) -> dict[str, Any]:
        said = [{"role": role, "content": text} for text in texts for role in ("user", "assistant")]
        if len(texts) == 1:
            said = [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": "yes"}]
        return {"samples": [{"messages": said}]}

    def several(count: int) -> tuple[str, dict[str, Any]]:
        return "/train", {"samples": texts([_piece(count)])["samples"] * count}

    return Route("/train", texts, several, texts(["hi"]) | {"steps": 1}, "metadata")


def _ids() -> Route:
    """An engine's own: ids, and no text but that to stop at."""

    def texts(texts: list[str]) -> dict[str, Any]:
        return {"prompt_ids": [1, 2], "sampling": {"max_tokens": 4, "stop": texts}}

    def several(count: int) -> tuple[str, dict[str, Any]]:
        return "/engine/generate", {"prompt_ids": [1] * (SIZE // 2), "sampling": {"max_tokens": 4}}

    return Route("/engine/generate", texts, several, {"prompt_ids": [1, 2]}, "session")


def _groups(path: str) -> Route:
    def trajectory(text: str) -> dict[str, Any]:
        said = [{"role": "user", "content": text}]
        return {"ids": [1, 2], "logprobs": [0, -1], "trained": [False, True], "spans": [[-1, 1], [0, 1]],
                "reward": 1.0, "messages": said}  # fmt: skip

    def texts(texts: list[str]) -> dict[str, Any]:
        if path == "/v2/trainer":
            return {"run_id": "r", "extra": {"texts": texts}}
        return {"groups": [{"trajectories": [trajectory(text) for text in texts]}]}

    def several(count: int) -> tuple[str, dict[str, Any]]:
        return path, texts([_piece(count)] * count)

    if path == "/v2/trainer":
        return Route(path, texts, several, {"run_id": "r"}, "extra")
    group = {"trajectories": [trajectory("hi")]}
    return Route(path, texts, several, group, "extra", (b'{"groups":[', b"]}"))


def _piece(count: int) -> str:
    return ("hello world " * (SIZE // count // 12 + 1))[: SIZE // count - 256]


# --- servers


class Server:
    def __init__(self, home: Path, *command: str) -> None:
        home.mkdir(parents=True)
        ready = home / "ready.json"
        with (home / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tandem", *command, "--data-dir", str(home / "data"), "--port", "0",
                 "--ready-file", str(ready)], stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        until = time.monotonic() + 180
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{' '.join(command)} did not start: {(home / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        told = json.loads(ready.read_text())
        self.pid, self.netloc = told["pid"], urlsplit(told["url"]).netloc
        self.token = Path(told["token_file"]).read_text()

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.netloc, timeout=300)
        headers = {"Authorization": f"Bearer {self.token}", "Idempotency-Key": f"k{time.monotonic_ns()}"}
        try:
            connection.request(method, path, body, headers | ({"Content-Type": "application/json"} if body else {}))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def warm_up(self, route: Route) -> None:
        """Return once a small request is answered, and what it began has ended."""
        status, answer = self.ask("POST", route.path, _dumped(route.beside))
        if route.path != "/train":
            return
        if status != 202:
            raise RuntimeError(f"the first job was not taken: {status} {answer.decode()}")
        path, until = f"/train/jobs/{json.loads(answer)['id']}", time.monotonic() + 600
        while (job := json.loads(self.ask("GET", path)[1]))["ended"] is None and time.monotonic() < until:
            time.sleep(0.05)
        if job["state"] not in ("published", "rejected"):
            raise RuntimeError(f"the first job is {job['state']}: {job['why']}")

    def memory_mib(self, line: str = "VmRSS") -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(each.split()[1]) / 1024 for each in lines if each.startswith(f"{line}:"))

    def forget_most_memory(self) -> None:
        """From now on, VmHWM is the most memory from now on."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@contextmanager
def started(home: Path, model: Path, name: str) -> Iterator[Server]:
    commands = {
        "serve": ("serve", str(model)),
        "engine": ("engine", "serve", str(model)),
        "gateway": ("gateway", "serve", "--model", str(model)),
        "online": ("online", "serve", str(home / "online.toml")),
        "rollouts": ("rollouts", "serve"),
    }
    (home / "online.toml").write_text(f'[model]\npath = "{model}"\n')
    server = Server(home / name, *commands[name])
    try:
        yield server
    finally:
        server.stop()


def model_in(directory: Path) -> Path:
    from tandem.model.presets import make_model
    from tandem.text.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    make_model("tiny", tokenizer, seed=0).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


# --- measuring


@dataclass
class Measured:
    status: int = 0
    answer_s: float = 0.0
    health_ms: float = 0.0
    memory_mib: float = 0.0

    @property
    def holds(self) -> bool:
        return (
            200 <= self.status < 500 and self.answer_s <= ANSWER_S
            and self.health_ms <= HEALTH_MS and self.memory_mib <= MEMORY_MIB
        )  # fmt: skip


def measure(server: Server, path: str, body: bytes, before_mib: float) -> Measured:
    found, waits = Measured(), list[float]()
    server.forget_most_memory()

    def be_rude() -> None:
        began = time.perf_counter()
        try:
            found.status = server.ask("POST", path, body)[0]
        except OSError:
            found.status = 599
        found.answer_s = time.perf_counter() - began

    rude = threading.Thread(target=be_rude)
    rude.start()
    other = http.client.HTTPConnection(server.netloc, timeout=300)
    while rude.is_alive():
        began = time.perf_counter()
        other.request("GET", "/health")
        other.getresponse().read()
        waits.append(time.perf_counter() - began)
        time.sleep(0.01)
    other.close()
    rude.join()
    found.health_ms = 1000 * sorted(waits)[min(len(waits) - 1, int(0.99 * len(waits)))] if waits else 0.0
    found.memory_mib = server.memory_mib("VmHWM") - before_mib
    return found


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--model", type=Path, help="a model directory; a small random model otherwise")
    asked.add_argument("--only", default="", help="servers, with commas between")
    asked.add_argument("--shapes", default="", help="the same of shapes")
    options = asked.parse_args()
    rows, missed = list[list[str]](), 0
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        model = (options.model or model_in(home / "model")).resolve()
        routes = {
            "serve": [_chat(model.name)],
            "engine": [_chat(model.name), _ids()],
            "gateway": [_chat(model.name), _generate()],
            "online": [_chat("online"), _train()],
            "rollouts": [_groups("/v2/groups"), _groups("/v2/trainer")],
        }
        for name, of_server in routes.items():
            if options.only and name not in options.only.split(","):
                continue
            with started(home, model, name) as server:
                for route in of_server:
                    server.warm_up(route)
                before_mib = server.memory_mib()
                for route in of_server:
                    for shape, path, body in shapes(route):
                        if options.shapes and shape not in options.shapes.split(","):
                            continue
                        found = measure(server, path, body, before_mib)
                        missed += not found.holds
                        rows.append(
                            [name, path, shape, str(found.status), f"{found.answer_s:.2f}", f"{found.health_ms:.0f}",
                             f"{found.memory_mib:.0f}", "" if found.holds else "missed"]
                        )  # fmt: skip
                        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    note(
        f"One request of {SIZE / 2**20:.2f} MiB at a time, {len(rows)} in all; model: {options.model or 'tiny, random'}"
    )
    table(["server", "route", "shape", "status", "answer s", "/health p99 ms", "memory MiB", ""], rows)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
