"""The compatible endpoints against atroposlib's own server: the same client, the same bytes, taking turns in one run.

    python benchmarks/rollouts_atropos.py --atropos-python .venv-atropos/bin/python [--deep 10000] [--json out.json]

Theirs keeps everything in memory; ours has every group on the disk (fsync) before it answers. Each group is 8 x 1024
tokens with logprobs, about 230 KB of JSON, and its bytes are its own. Rows that are called native are such groups in
the forms of our own protocol, against its posts of 8. `--deep`: so many groups queued, for ours alone; theirs needs
about 1 MB of memory for each.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollouts
from common import table

CONNECTIONS = 16
PROMPT_SHARE = 8
BATCH = 64
NATIVE = (
    ("native JSON of 8, groups/s", rollouts.JSON, 8, 1),
    ("native binary of 64, groups/s", rollouts.codec.BINARY, 64, 8),
)
"""Name, content type, groups a post, and how many times the others' groups: binary ones are over too soon."""


@dataclass
class Server:
    name: str
    port: int
    pid: int
    token: str = ""

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            sent = None if body is None else json.dumps(body).encode()
            connection.request(method, path, sent, {"Content-Type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def begin(self, batch_size: int, max_tokens: int) -> int:
        """Everything forgotten, a trainer and an environment registered; the environment's id."""
        self.call("GET", "/reset_data")
        trainer = {
            "wandb_group": "", "wandb_project": "", "batch_size": batch_size, "max_token_len": max_tokens,
            "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1000,
        }  # fmt: skip
        assert self.call("POST", "/register", trainer)[0] == 200
        self.call("GET", "/batch")
        environment = {"max_token_length": max_tokens, "desired_name": "bench", "weight": 1.0, "group_size": 8}
        return json.loads(self.call("POST", "/register-env", environment)[1])["env_id"]

    def begin_native(self) -> int:
        """An environment of our own protocol beside it."""
        headers = {"Authorization": f"Bearer {self.token}", "Idempotency-Key": uuid.uuid4().hex}
        return json.loads(self.call("POST", "/v2/environments", {"name": "bench"}, **headers)[1])["id"]

    @property
    def memory_mb(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


# --- bodies


class Bodies:
    """One group, written once; the first score tells one post from another."""

    def __init__(self, env_id: int, length: int, size: int = 8) -> None:
        chance = random.Random(length)
        prompt = length // PROMPT_SHARE
        tokens = [[chance.randrange(151_000) for _ in range(length)] for _ in range(size)]
        masks = [[-100] * prompt + row[prompt:] for row in tokens]
        logprobs = [
            [1.0] * prompt + [round(-chance.expovariate(2), 10) for _ in range(length - prompt)] for _ in range(size)
        ]
        post = {
            "tokens": tokens,
            "masks": masks,
            "scores": [0.0] * size,
            "inference_logprobs": logprobs,
            "env_id": env_id,
        }
        self._before, self._after = json.dumps(post).encode().split(b'"scores": [0.0, ')
        self._number = random.randrange(10**6)

    def next(self) -> bytes:
        self._number += 1
        return b'%s"scores": [%d.5, %s' % (self._before, self._number, self._after)

    def next_list(self, count: int) -> bytes:
        return b"[" + b",".join(self.next() for _ in range(count)) + b"]"


@dataclass(frozen=True)
class Work:
    """What one row posts. `native`: the content type of our own protocol that it goes as."""

    port: int
    env_id: int
    posts: int
    per_post: int
    length: int = 1024
    native: str = ""
    token: str = ""

    @property
    def path(self) -> str:
        if self.native:
            return f"/v2/groups?environment={self.env_id}"
        return "/scored_data" if self.per_post == 1 else "/scored_data_list"

    def bodies(self) -> list[bytes]:
        if self.native:
            native = rollouts.Bodies(self.per_post, self.native, self.length)
            return [native.next() for _ in range(self.posts)]
        bodies = Bodies(self.env_id, self.length)
        return [bodies.next() if self.per_post == 1 else bodies.next_list(self.per_post) for _ in range(self.posts)]

    def headers(self) -> dict[str, str]:
        if not self.native:
            return {"Content-Type": "application/json"}
        key = uuid.uuid4().hex
        return {"Content-Type": self.native, "Authorization": f"Bearer {self.token}", "Idempotency-Key": key}


def post_all(work: Work, ready: Any, go: Any, out: Any) -> None:
    """A process of its own, so that making requests takes no time from whoever measures."""
    made = work.bodies()
    failed: list[str] = []

    def worker(mine: list[bytes]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", work.port, timeout=120)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for body in mine:
            connection.request("POST", work.path, body, work.headers())
            answer = connection.getresponse()
            said = answer.read()
            if answer.status != 200:
                failed.append(f"{answer.status} {said[:200]!r}")
        connection.close()

    threads = [threading.Thread(target=worker, args=(made[number::CONNECTIONS],)) for number in range(CONNECTIONS)]
    ready.set()
    go.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out.put((time.perf_counter() - started, failed))


def groups_per_s(
    server: Server, env_id: int, *, groups: int, per_post: int = 1, length: int = 1024, native: str = ""
) -> float:
    context = multiprocessing.get_context("spawn")
    ready, go, out = context.Event(), context.Event(), context.Queue()
    work = Work(server.port, env_id, groups // per_post, per_post, length, native, server.token)
    process = context.Process(target=post_all, args=(work, ready, go, out))
    process.start()
    ready.wait()
    go.set()
    seconds, failed = out.get()
    process.join()
    assert not failed, failed[0]
    return groups // per_post * per_post / seconds


def batch_seconds(server: Server, count: int, *, gzip: bool, sequences: int = BATCH) -> list[float]:
    taken: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        status, body = server.call("GET", "/batch", **{"Accept-Encoding": "gzip" if gzip else "identity"})
        taken.append(time.perf_counter() - started)
        assert status == 200
        assert len(body) > 10_000, body[:200]
    return taken


# --- servers


@contextlib.contextmanager
def theirs(python: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [python, "-m", "uvicorn", "atroposlib.api.server:app", "--port", str(port), "--log-level", "warning"]
    with _started(command) as process:
        server = Server("atroposlib", port, process.pid)
        _wait(lambda: server.call("GET", "/")[0] == 200)
        yield server


@contextlib.contextmanager
def ours(data_dir: Path) -> Iterator[Server]:
    ready = data_dir / "ready.json"
    command = [
        sys.executable, "-m", "tandem", "rollouts", "serve", "--data-dir", str(data_dir), "--port", "0",
        "--ready-file", str(ready), "--atropos", "--insecure-no-auth",
    ]  # fmt: skip
    with _started(command) as process:
        _wait(ready.exists)
        port = int(json.loads(ready.read_text())["url"].rpartition(":")[2])
        yield Server("tandem", port, process.pid, (data_dir / "token").read_text())


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def _wait(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)


# --- what is measured


def measure(servers: list[Server], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By row, by server. Servers take turns, so that a busy machine is busy for both."""
    found: dict[str, dict[str, list[float]]] = {}

    def note(row: str, server: Server, values: list[float]) -> None:
        found.setdefault(row, {}).setdefault(server.name, []).extend(values)

    for _ in range(args.rounds):
        for server in servers:
            env_id = server.begin(BATCH, 2048)
            note("POST, groups/s", server, [groups_per_s(server, env_id, groups=args.groups)])
        for server in servers:
            env_id = server.begin(BATCH, 2048)
            rate = groups_per_s(server, env_id, groups=args.groups, per_post=8)
            note("POST of 8, groups/s", server, [rate])
            for name, kind, per_post, times in NATIVE:
                if server.token:
                    env_id = server.begin_native()
                    rate = groups_per_s(server, env_id, groups=times * args.groups, per_post=per_post, native=kind)
                note(name, server, [rate])
        for server in servers:
            env_id = server.begin(BATCH, 2048)
            groups_per_s(server, env_id, groups=6 * BATCH // 8)
            batch_seconds(server, 1, gzip=False)  # theirs makes all batches at the first call
            note("/batch 64x1024 plain, ms", server, [1e3 * each for each in batch_seconds(server, 2, gzip=False)])
            note("/batch 64x1024 gzip, ms", server, [1e3 * each for each in batch_seconds(server, 2, gzip=True)])
    for server in servers:
        env_id = server.begin(BATCH, 40_000)
        groups_per_s(server, env_id, groups=2 * BATCH // 8, length=32_768)
        note("/batch 64x32k plain, s", server, batch_seconds(server, 1, gzip=False))
        note("/batch 64x32k gzip, s", server, batch_seconds(server, 1, gzip=True))
        note("memory after, MB", server, [server.memory_mb])
    return {row: {name: statistics.median(values) for name, values in by.items()} for row, by in found.items()}


def deep(server: Server, groups: int) -> dict[str, float]:
    """Many groups queued: memory for each, and the first batch."""
    env_id = server.begin(BATCH, 2048)
    before = server.memory_mb
    rate = groups_per_s(server, env_id, groups=groups // 8 * 8, per_post=8)
    held = server.memory_mb - before
    first = batch_seconds(server, 5, gzip=False)
    return {
        "groups": groups, "POST, groups/s": rate, "memory, MB a group": held / groups,
        "first /batch, ms": 1e3 * first[0], "/batch, ms": 1e3 * statistics.median(first),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atropos-python", default=".venv-atropos/bin/python")
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deep", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("ours", "theirs"))
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="rollouts-", dir=Path.cwd()))
    try:
        with contextlib.ExitStack() as stack:
            servers: list[Server] = []
            if args.only != "ours":
                servers.append(stack.enter_context(theirs(args.atropos_python)))
            if args.only != "theirs":
                servers.append(stack.enter_context(ours(directory)))
            figures: dict[str, Any] = measure(servers, args) if args.rounds else {}
            if args.deep and args.only != "theirs":
                figures["deep"] = deep(servers[-1], args.deep)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def show(figures: dict[str, Any]) -> None:
    rows: list[list[str]] = []
    for row, by in figures.items():
        if row == "deep":
            continue
        their, our = by.get("atroposlib"), by.get("tandem")
        times = "" if their is None or our is None else f"{our / their if 'groups/s' in row else their / our:.2f}x"
        rows.append([row, *("" if each is None else f"{each:,.2f}" for each in (their, our)), times])
    table(["what", "atroposlib (memory)", "tandem (durable)", "better by"], rows)
    for name, value in figures.get("deep", {}).items():
        print(f"deep: {name} {value:,.3f}")


if __name__ == "__main__":
    main()
