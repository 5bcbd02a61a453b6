"""Measure a control server under load: `python benchmarks/control_load.py --agents 200 --seconds 30`.

A real `tandem control serve` process. One process of stand-in agents, each of which sends a sign of life, a row of
metrics and a new progress.json every second; a second process of callers, which submit runs and ask for the state of
runs as fast as they are answered, one request at a time each. It prints the median, the 99th percentile and the most of
each, and how late the rows were.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from tandem.control.tokens import attempt_secret, attempt_token

SPEC = """recipe = "rl"
model = { preset = "tiny" }
environment = { name = "sort" }
train = { steps = 1, lr = 1e-3, groups_per_step = 1, group_size = 2 }
"""
_ALONE_S = 6.0


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--agents", type=int, default=200)
    asked.add_argument("--seconds", type=float, default=30.0)
    asked.add_argument("--submits-a-second", type=float, default=2.0)
    asked.add_argument("--database", default="", help="of PostgreSQL; default: SQLite")
    asked.add_argument("--as", dest="role", default="", help=argparse.SUPPRESS)
    asked.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    asked.add_argument("--server", type=int, help=argparse.SUPPRESS)
    options = asked.parse_args()
    if options.role:
        role = {"agents": agents, "callers": callers, "alone": alone}[options.role]
        print(json.dumps(asyncio.run(role(options.home, options))))
        return
    with tempfile.TemporaryDirectory() as home:
        measure(Path(home), options)


def measure(home: Path, options: argparse.Namespace) -> None:
    # A machine that never answers: the loop opens attempts, starts nothing, and looks at all runs every second.
    (home / "targets.toml").write_text('[targets.box]\nkind = "ssh"\nhost = "127.0.0.1"\nport = 9\nusd_per_hour = 1\n')
    command = [
        sys.executable, "-m", "tandem", "control", "serve", "--data-dir", str(home / "data"), "--port", "0",
        "--targets", str(home / "targets.toml"), "--database", options.database,
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(home / "log").open("w"))
    try:
        while not (home / "data" / "ready.json").exists():
            assert server.poll() is None, (home / "log").read_text()
            time.sleep(0.05)
        again = [sys.executable, __file__, *sys.argv[1:], "--home", str(home)]
        roles = [subprocess.Popen([*again, "--as", role], stdout=subprocess.PIPE) for role in ("agents", "callers")]
        began, before = time.monotonic(), cpu_seconds(server.pid)
        found = [json.loads(role.communicate()[0]) for role in roles]
        share = (cpu_seconds(server.pid) - before) / (time.monotonic() - began)
        costs = json.loads(subprocess.check_output([*again, "--as", "alone", "--server", str(server.pid)]))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=20)
    for name, values in [(name, values) for part in found for name, values in part.items()]:
        values = sorted(values)
        p99 = values[min(len(values) - 1, int(len(values) * 0.99))]
        middle, most = statistics.median(values), values[-1]
        print(
            f"{name:<28} {len(values):>6}  median {middle * 1000:7.1f} ms  p99 {p99 * 1000:7.1f} ms  "
            f"most {most * 1000:7.1f} ms"
        )
    for name, milliseconds in costs.items():
        print(f"{name:<28} {milliseconds:6.2f} ms of the server's CPU")
    print(f"the server used {share:.2f} of a core; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Wire:
    """One kept connection. httpx takes more of a core for 200 connections than the server that is measured."""

    def __init__(self, home: Path) -> None:
        url = json.loads((home / "data" / "ready.json").read_text())["url"]
        self.host, _, port = url.removeprefix("http://").rpartition(":")
        self.port = int(port)
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, headers: dict[str, str], body: Any = None) -> Any:
        content = b"" if body is None else json.dumps(body).encode()
        if self.streams is None:
            self.streams = await asyncio.open_connection(self.host, self.port)
        reader, writer = self.streams
        sent = {"Host": f"{self.host}:{self.port}", "Content-Length": str(len(content)), **headers}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + content)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        answer = await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r")[0]))
        assert head.split()[1] in ("200", "201", "202"), (path, head, answer)
        return json.loads(answer)


def keyed(home: Path) -> dict[str, str]:
    token = (home / "data" / "token").read_text().strip()
    return {
        "Authorization": f"Bearer {token}", "Idempotency-Key": uuid.uuid4().hex, "Content-Type": "application/json",
    }  # fmt: skip


async def submit(wire: Wire, home: Path, name: str) -> str:
    body = {"spec_toml": SPEC, "target": "box", "name": name}
    return (await wire.ask("POST", "/api/runs", keyed(home), body))["id"]


async def agents(home: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Submit a run for each agent, claim its attempt as soon as the loop has opened it, and send rows."""
    took: list[float] = []
    secret = attempt_secret(home / "data")
    wire = Wire(home)
    runs = [await submit(wire, home, "agent") for _ in range(options.agents)]
    tokens = [await opened(home, options, run, secret) for run in runs]
    until = time.monotonic() + options.seconds
    (home / "agents-run").touch()
    async with asyncio.TaskGroup() as group:
        for number, (attempt, token) in enumerate(tokens):
            group.create_task(agent(Wire(home), attempt, token, number / options.agents, until, took))
    return {"agent's row and sign of life": took}


async def opened(home: Path, options: argparse.Namespace, run: str, secret: bytes) -> tuple[str, str]:
    """Return the attempt of a run, which no route tells: from the database itself."""
    import sqlalchemy as sa

    engine = sa.create_engine(options.database or f"sqlite:///{home}/data/control.sqlite3")
    try:
        while True:
            with engine.connect() as connection:
                found = connection.execute(sa.text("select id from attempts where run = :run"), {"run": run}).scalar()
            if found:
                return found, attempt_token(secret, found)
            await asyncio.sleep(0.05)
    finally:
        engine.dispose()


async def agent(wire: Wire, attempt: str, token: str, phase: float, until: float, took: list[float]) -> None:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    instance = uuid.uuid4().hex
    await wire.ask("POST", f"/api/attempts/{attempt}/claim", headers, {"instance": instance})
    at, step, next_at = {"metrics.jsonl": (0, 0), "progress.json": (0, 0)}, 0, time.monotonic() + phase
    while next_at < until:
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
        next_at, step = next_at + 1.0, step + 1
        body = appended(instance, step, at)
        began = time.perf_counter()
        answer = await wire.ask("POST", f"/api/attempts/{attempt}/append", headers, body)
        took.append(time.perf_counter() - began)
        for file, stream in answer["streams"].items():
            at[file] = (stream["generation"], stream["size"])


def appended(instance: str, step: int, at: dict[str, tuple[int, int]]) -> dict[str, Any]:
    row = json.dumps({"step": step, **{f"metric/{number}": step * number / 7 for number in range(40)}}) + "\n"
    sign = json.dumps({"process": instance, "ticks": step, "stage": "rl", "step": step, "limit_s": 60.0})
    pieces = [
        piece("metrics.jsonl", at["metrics.jsonl"][0] or 1, at["metrics.jsonl"][1], row.encode()),
        piece("progress.json", at["progress.json"][0] + 1, 0, sign.encode()),
    ]
    return {"instance": instance, "sign": {"ticks": step, "limit_s": 60, "step": step}, "pieces": pieces}


def piece(file: str, generation: int, offset: int, data: bytes) -> dict[str, Any]:
    return {
        "file": file, "generation": generation, "offset": offset, "data": base64.b64encode(data).decode(),
        "sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip


async def alone(home: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the server's CPU milliseconds for one request of each kind, less what it takes when nobody asks."""
    wire, secret = Wire(home), attempt_secret(home / "data")
    run = await submit(wire, home, "alone")
    attempt, token = await opened(home, options, run, secret)
    headers, instance = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}, uuid.uuid4().hex
    await wire.ask("POST", f"/api/attempts/{attempt}/claim", headers, {"instance": instance})
    at = {"metrics.jsonl": (0, 0), "progress.json": (0, 0)}

    async def state(_: int) -> None:
        await wire.ask("GET", f"/api/runs/{run}", keyed(home))

    async def page(_: int) -> None:
        await wire.ask("GET", "/api/runs", keyed(home))

    async def grown(number: int) -> None:
        body = appended(instance, number, at)
        answer = await wire.ask("POST", f"/api/attempts/{attempt}/append", headers, body)
        at.update({file: (stream["generation"], stream["size"]) for file, stream in answer["streams"].items()})

    async def cpu_of(ask: Any, a_second: float) -> tuple[float, int]:
        """Return the CPU seconds of some seconds, less those of as many without requests."""
        used: list[float] = []
        for asks in (False, True):
            before, began, number = cpu_seconds(options.server), time.monotonic(), 0
            while (now := time.monotonic()) < began + _ALONE_S:
                await asyncio.sleep(max(0.0, began + number / a_second - now))
                number += 1
                if asks:
                    await ask(number)
            used.append(cpu_seconds(options.server) - before)
        return used[1] - used[0], number

    await grown(0)
    kinds = {"an agent's row, alone": (grown, 60), "status of a run, alone": (state, 60), "list, alone": (page, 10)}
    found = {name: await cpu_of(*kind) for name, kind in kinds.items()}
    return {name: seconds / number * 1000 for name, (seconds, number) in found.items()}


async def callers(home: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Ask for the state of runs, ten times a second, and submit further ones, once all agents send."""
    while not (home / "agents-run").exists():
        await asyncio.sleep(0.05)
    submits: list[float] = []
    states: list[float] = []
    pages: list[float] = []
    runs = [each["id"] for each in (await Wire(home).ask("GET", "/api/runs", keyed(home)))["items"]]
    await asyncio.sleep(2.0)  # the agents have claimed
    until = time.monotonic() + options.seconds - 3

    async def often(a_second: float, took: list[float], method: str, what: Any) -> None:
        wire, next_at = Wire(home), time.monotonic()
        while next_at < until:
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            next_at += 1 / a_second
            path, body = what(len(took))
            began = time.perf_counter()
            await wire.ask(method, path, keyed(home), body)
            took.append(time.perf_counter() - began)

    body = {"spec_toml": SPEC, "target": "box", "name": "more"}
    async with asyncio.TaskGroup() as group:
        group.create_task(often(options.submits_a_second, submits, "POST", lambda _: ("/api/runs", body)))
        group.create_task(often(10, states, "GET", lambda n: (f"/api/runs/{runs[n % len(runs)]}", None)))
        group.create_task(often(0.5, pages, "GET", lambda _: ("/api/runs", None)))
    return {"submit": submits, "status of a run": states, "list of 50 runs": pages}


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[1] / "src"))
    main()
