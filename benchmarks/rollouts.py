"""What the rollout service does in a second, and how long it makes others wait: durable posts, batches, a long queue.

python benchmarks/rollouts.py [--seconds 4] [--queued 10000] [--only posts,take,queue]

The server is a process of its own, as `tandem rollouts serve` starts it; the client is this one, on the same machine.
Every group has tokens of its own. A group of 8 x 1024 tokens is 74 KB binary and about 230 KB JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from common import note, table
from tandem.rollout.remote import lease_codec
from tandem.rollout.wire import codec
from tandem.rollout.wire.schema import PREFIX
from tandem.types import Trajectory

JSON = "application/json"


class Service(AbstractContextManager["Service"]):
    def __init__(self, data_dir: Path, *options: str) -> None:
        self.data_dir, ready = data_dir, data_dir / "ready.json"
        ready.unlink(missing_ok=True)
        started = time.perf_counter()
        command = [sys.executable, "-m", "tandem", "rollouts", "serve", "--port", "0", *options]
        command += ["--data-dir", str(data_dir), "--ready-file", str(ready)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not ready.exists():
            assert self.process.poll() is None, "the service ended"
            time.sleep(0.005)
        said = json.loads(ready.read_text())
        self.port = int(said["url"].rpartition(":")[2])
        self.token = Path(said["token_file"]).read_text()
        self.client = Client(self)
        self.client.get("/health")
        self.seconds_to_serve = time.perf_counter() - started

    def memory_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def kill(self) -> None:
        self.client.connection.close()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __exit__(self, *_: object) -> None:
        self.client.connection.close()
        self.process.terminate()
        self.process.wait(timeout=30)


class Client:
    """One connection."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
        self.headers = {"Authorization": f"Bearer {service.token}"}

    def get(self, path: str) -> bytes:
        return self._ask("GET", path, None, {})

    def post(self, path: str, body: bytes | dict[str, Any], kind: str = JSON, accept: str = JSON) -> bytes:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"Content-Type": kind, "Accept": accept, "Idempotency-Key": uuid.uuid4().hex}
        return self._ask("POST", path, content, headers)

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        self.connection.request(method, path, body, self.headers | headers)
        answer = self.connection.getresponse()
        content = answer.read()
        assert answer.status in (200, 204), content[:300]
        return content


def group(siblings: int = 8, tokens: int = 1024) -> list[Trajectory]:
    prompt = tokens // 8
    return [
        Trajectory(
            ids=random.choices(range(150_000), k=tokens),
            trained=[False] * prompt + [True] * (tokens - prompt),
            logprobs=[0.0] * prompt + [round(-random.random(), 6) for _ in range(tokens - prompt)],
            versions=[-1] * prompt + [0] * (tokens - prompt),
            reward=float(sibling % 2),
        )
        for sibling in range(siblings)
    ]


def register(client: Client, *, per_step: int = 64, environments: int = 1) -> int:
    trainer = {"run_id": "bench", "groups_per_step": per_step, "max_lag": 1, "num_ids": 150_000}
    epoch = json.loads(client.post("/v2/trainer", trainer))["epoch"]
    for number in range(environments):
        client.post("/v2/environments", {"name": f"env{number}"})
    return epoch


class Bodies:
    """Posts of `many` groups; each differs from all others in its ids."""

    def __init__(self, many: int, kind: str, tokens: int = 1024) -> None:
        made = [codec.encode(group(tokens=tokens)) for _ in range(min(many, 16))]
        self.kind, self.many, self.tokens = kind, many, tokens
        frames = [bytes(made[number % len(made)].frame) for number in range(many)]
        self.head = PREFIX.size + PREFIX.unpack_from(frames[0])[1]
        self.size = len(frames[0])
        if kind == JSON:
            groups = [codec.to_json(frame) for frame in frames]
            groups[0].trajectories[0].ids[0] = 1000_0000
            self.text = msgspec.json.encode({"groups": groups}).replace(b"10000000", b"%06d", 1)
        else:
            self.frames = bytearray(b"".join(frames))
        self.count = 0

    def next(self) -> bytes:
        self.count += 1
        if self.kind == JSON:
            return self.text.replace(b"%06d", b"%06d" % (100_000 + self.count % 50_000), 1)
        for number in range(self.many):
            at = number * self.size + self.head
            self.frames[at : at + 4] = (self.count * 64 + number).to_bytes(4, "little")[:2] + b"\1\0"
        return bytes(self.frames)


def posts_per_s(many: int, kind: str, *, lanes: int, seconds: float) -> tuple[float, float]:
    """Groups a second, and the median of a post's milliseconds."""
    with temporary() as directory, Service(directory) as service:
        register(service.client)
        done: list[float] = []
        end = time.perf_counter() + seconds

        def lane() -> None:
            client, bodies = Client(service), Bodies(many, kind)
            ready.wait()
            while time.perf_counter() < stop[0]:
                body = bodies.next()
                started = time.perf_counter()
                client.post("/v2/groups?environment=1", body, kind)
                done.append(time.perf_counter() - started)

        ready, stop = threading.Barrier(lanes + 1), [end]
        threads = [threading.Thread(target=lane) for _ in range(lanes)]
        for thread in threads:
            thread.start()
        stop[0] = time.perf_counter() + 3600
        ready.wait()
        started = time.perf_counter()
        stop[0] = started + seconds
        for thread in threads:
            thread.join()
        return len(done) * many / (time.perf_counter() - started), statistics.median(done) * 1000


def take_ms(groups: int, tokens: int, *, rounds: int = 7, accept: str = codec.BINARY) -> tuple[float, float, float]:
    """Milliseconds from asking for a batch to holding it: median and slowest; and its MB."""
    with temporary() as directory, Service(directory) as service:
        client = service.client
        epoch = register(client, per_step=groups)
        taken: list[float] = []
        size = 0
        body = Bodies(groups, codec.BINARY, tokens).next()
        for _ in range(rounds):
            client.post("/v2/groups?environment=1", body, codec.BINARY)
            started = time.perf_counter()
            answer = client.post("/v2/leases", {"epoch": epoch, "groups": groups}, accept=accept)
            taken.append((time.perf_counter() - started) * 1000)
            size = len(answer)
            if accept == codec.BINARY:
                lease = lease_codec.decode_lease(answer)
                assert len(lease.groups) == groups
                client.post("/v2/ack", {"epoch": epoch, "leases": [lease.id]})
            client.post("/v2/release", {"epoch": epoch, "count": groups})
        return statistics.median(taken), max(taken), size / 1e6


PROBE = """
import http.client, sys, time
client = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
while True:
    started = time.perf_counter()
    client.request("GET", "/v2/environments/1", headers={"Authorization": "Bearer " + sys.argv[2]})
    client.getresponse().read()
    print((time.perf_counter() - started) * 1000, flush=True)
    time.sleep(0.002)
"""


class Others:
    """Somebody else's short requests meanwhile, from a process of its own: how long each took."""

    def __init__(self, service: Service) -> None:
        command = [sys.executable, "-c", PROBE, str(service.port), service.token]
        self.file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until `end`
        self.process = subprocess.Popen(command, stdout=self.file)

    def end(self) -> list[float]:
        self.process.kill()
        self.process.wait()
        self.file.seek(0)
        times = [float(line) for line in self.file.read().split("\n")[:-1]]
        self.file.close()
        return times


def long_queue(queued: int) -> list[list[str]]:
    with temporary() as idle_directory, Service(idle_directory) as idle, temporary() as directory:
        register(idle.client)
        with Service(directory) as service:
            client = service.client
            epoch = register(client)
            before, bodies = service.memory_mib(), Bodies(50, codec.BINARY)
            others, beside = Others(service), Others(idle)
            for _ in range(queued // 50):
                client.post("/v2/groups?environment=1", bodies.next(), codec.BINARY)
            filling, nothing = others.end(), beside.end()
            each = (service.memory_mib() - before) / queued
            others = Others(service)
            forming: list[float] = []
            for _ in range(20):
                started = time.perf_counter()
                lease = lease_codec.decode_lease(
                    client.post("/v2/leases", {"epoch": epoch, "groups": 8}, accept=codec.BINARY)
                )
                forming.append((time.perf_counter() - started) * 1000)
                client.post("/v2/ack", {"epoch": epoch, "leases": [lease.id]})
                client.post("/v2/release", {"epoch": epoch, "count": 8})
            taking = others.end()
            service.kill()
        again: list[float] = []
        for _ in range(5):
            with Service(directory) as service:
                again.append(service.seconds_to_serve)
                assert json.loads(service.client.get("/v2/status"))["queue"]["queued"] == queued - 160
                service.kill()
    inside = form_ms(queued)
    return [
        [f"memory of each of {queued} queued groups", f"{each:.4f} MiB", "0.1"],
        [f"forming a batch of 8 groups among {queued}, in the queue", f"{inside:.2f} ms", "5"],
        ["the same from the client: with its bytes, durable", f"{statistics.median(forming):.1f} ms", ""],
        ["other requests while it fills: median, 99 %, longest", in_ms(filling), "50"],
        ["the same of a service beside it that has nothing to do", in_ms(nothing), ""],
        ["other requests while batches go", in_ms(taking), "50"],
        ["from start to serving after kill -9, median of 5", f"{statistics.median(again):.2f} s", "2"],
    ]


def in_ms(times: list[float]) -> str:
    in_order = sorted(times)
    return f"{statistics.median(times):.1f}, {in_order[int(0.99 * len(times))]:.1f}, {in_order[-1]:.1f} ms"


def form_ms(queued: int) -> float:
    """Of the event loop's own time: choosing the groups of a batch, in a queue of that length. Slowest of 20."""
    from tandem.io.append_only_segments import SegmentPlace
    from tandem.rollout.queue.state import EnvironmentState, QueueEntry, QueueState
    from tandem.rollout.queue.types import RegisteredEnvironment, TrainerSpec

    state = QueueState()
    state.trainer = TrainerSpec("bench", groups_per_step=8, max_lag=1)
    for id in range(1, 5):
        state.environments[id] = EnvironmentState(id, f"e{id}", RegisteredEnvironment(f"e{id}", weight=float(id)), 0.0)
    state.update_shares()
    for number in range(queued):
        entry = QueueEntry(number, number % 4 + 1, place=SegmentPlace(1, 0, 0, 0), size=8, tokens=8192)
        state.entries[number] = entry
        state.environments[entry.environment].backlog.append(entry)
        state.in_backlogs += 1
    slowest = 0.0
    for _ in range(20):
        started = time.perf_counter()
        chosen, _ = state.ready(8)
        state.lease_out(chosen, 0.0)
        slowest = max(slowest, (time.perf_counter() - started) * 1000)
        state.leases.clear()
    return slowest


@contextmanager
def temporary() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rollouts-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def posts(seconds: float) -> list[list[str]]:
    rows: list[list[str]] = []
    for name, many, kind, lanes in (
        ("binary, 64 groups a post, 3 at a time", 64, codec.BINARY, 3),
        ("binary, 16 groups a post, 4 at a time", 16, codec.BINARY, 4),
        ("binary, 1 group a post, 8 at a time", 1, codec.BINARY, 8),
        ("JSON, 8 groups a post, 2 at a time", 8, JSON, 2),
        ("JSON, 1 group a post, 8 at a time", 1, JSON, 8),
    ):
        rate, ms = posts_per_s(many, kind, lanes=lanes, seconds=seconds)
        rows.append([name, f"{rate:.0f}", f"{ms:.1f}"])
    return rows


def takes() -> list[list[str]]:
    rows: list[list[str]] = []
    for name, groups, tokens, accept, most in (
        ("64 x 1024, binary", 8, 1024, codec.BINARY, "10"),
        ("64 x 1024, JSON", 8, 1024, JSON, ""),
        ("64 x 32768, binary", 8, 32768, codec.BINARY, "300"),
    ):
        median, slowest, size = take_ms(groups, tokens, accept=accept)
        rows.append([name, f"{median:.1f}", f"{slowest:.1f}", f"{size:.1f}", most])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--only", default="posts,take,queue")
    asked = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "posts": lambda: table(["durable posts of 8 x 1024 tokens", "groups/s", "ms a post"], posts(asked.seconds)),
        "take": lambda: table(["a batch, leased durably", "median ms", "slowest", "MB", "at most"], takes()),
        "queue": lambda: table(["a long queue", "measured", "at most"], long_queue(asked.queued)),
    }
    random.seed(0)
    for name in asked.only.split(","):
        parts[name]()
        print()
    note(f"{os.cpu_count()} cores, shared by server and client")


if __name__ == "__main__":
    main()
