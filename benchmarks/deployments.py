"""Flip the revisions of a deployment under load: `python benchmarks/deployments.py --requests 10000`.

A real control server, a real agent and two checkpoints of a run of the quickstart's size behind one name. Many
connections ask the name while `promote` sends all requests to the other revision, again and again. It counts the
requests that were lost, and the answers that are not of one revision: the header, the answer's own model, the version
of each of its tokens and, with a seed of its own, its tokens must be those of the same revision. A request that begins
after a promote has returned must be answered by the promoted revision. Then it lets the replica sleep, and measures how
long a request that wakes it takes, beside the time in which `tandem serve` alone loads the same weights. Last it
deploys and promotes adapters over a base that runs already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from common import note, table
from run_kills import ENVIRONMENT
from tandem.client import Tandem

NAME, MOST_TOKENS, PROMPTS = "support", 8, 32
SPEC: dict[str, Any] = {
    "recipe": "rl",
    "device": "cpu",
    "model": {"preset": "tiny"},
    "train": {"steps": 6, "lr": 3e-2, "groups_per_step": 2, "group_size": 4, "max_tokens": 8},
    "eval": {"tasks": 4},
    "checkpoint": {"every": 1, "keep_every": 1},
}


class Server:
    """A control server whose only target is this machine."""

    def __init__(self, home: Path) -> None:
        self.home, data = home, home / "data"
        path = os.environ.get("PYTHONPATH", "")
        (home / "tandem").write_text(
            f"#!/bin/sh\nexport PYTHONPATH='{path}' OMP_NUM_THREADS=1\nexec {sys.executable} -P -m tandem \"$@\"\n"
        )
        (home / "tandem").chmod(0o755)
        (home / "targets.toml").write_text(
            f'[targets.here]\nkind = "local"\ndirectory = "{home}/jobs"\ntandem = "{home}/tandem"\n'
        )
        command = ["control", "serve", "--port", "0", "--data-dir", str(data), "--targets", str(home / "targets.toml")]
        with (home / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tandem", *command], stdout=log, stderr=log, cwd=home
            )
        self.url = ready_url(data / "ready.json", self.process)
        self.token = (data / "token").read_text().strip()

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        for path in Path("/proc").glob("[0-9]*"):  # what the jobs of this server still run
            with suppress(OSError, ProcessLookupError):
                if f"TANDEM_JOB={self.home}".encode() in (path / "environ").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)


def ready_url(file: Path, process: subprocess.Popen[bytes]) -> str:
    while not file.exists():
        assert process.poll() is None
        time.sleep(0.02)
    return str(json.loads(file.read_text())["url"])


def until(true: Any) -> None:
    while not true():
        time.sleep(0.05)


# --- flips


class Load:
    """Connections that ask the name until so many requests were sent; what they got."""

    def __init__(self, server: Server, steps: dict[str, int], requests: int) -> None:
        self.left, self.steps, self.url = requests, steps, server.url
        self.http = httpx.AsyncClient(
            base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}, timeout=120, trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )  # fmt: skip
        self.expected: dict[str, list[list[int]]] = {}
        self.lost = Counter[str]()
        self.mixed = Counter[str]()
        self.by_revision = Counter[str]()
        self.flips: list[tuple[float, float, str]] = []
        self.seconds: list[float] = []

    async def ask(self, model: str, prompt: int) -> httpx.Response:
        body = {
            "model": model, "messages": [{"role": "user", "content": f"sort {chr(97 + prompt % 26)}elt{prompt}"}],
            "max_tokens": MOST_TOKENS, "temperature": 1, "seed": prompt, "return_token_ids": True,
        }  # fmt: skip
        return await self.http.post("/v1/chat/completions", json=body)

    async def learn(self) -> None:
        """Ask each revision by its own name."""
        for revision in self.steps:
            answers = [(await self.ask(revision, prompt)).json() for prompt in range(PROMPTS)]
            self.expected[revision] = [each["choices"][0]["token_ids"] for each in answers]

    async def connection(self) -> None:
        while self.left > 0:
            self.left -= 1
            prompt, began = self.left % PROMPTS, time.monotonic()
            try:
                told = await self.ask(NAME, prompt)
            except httpx.TransportError as error:
                self.lost[type(error).__name__] += 1
                continue
            if told.status_code != 200:
                self.lost[str(told.status_code)] += 1
                continue
            self.seconds.append(time.monotonic() - began)
            self._check(told.headers["x-tandem-revision"], told.json(), prompt, began)

    def _check(self, revision: str, body: dict[str, Any], prompt: int, began: float) -> None:
        self.by_revision[revision] += 1
        choice, step = body["choices"][0], self.steps[revision]
        if body["model"] != revision:
            self.mixed["model"] += 1
        if {version for version, _ in choice["weight_versions"]} != {step}:
            self.mixed["version of tokens"] += 1
        if choice["token_ids"] != self.expected[revision][prompt]:
            self.mixed["tokens"] += 1
        before = [to for _, returned, to in self.flips if returned < began]
        under_way = any(asked < time.monotonic() and returned > began for asked, returned, _ in self.flips)
        if before and before[-1] != revision and not under_way:
            self.mixed["not the promoted one"] += 1

    async def flip(self, server: Server) -> None:
        with Tandem(server.url, server.token) as client:
            for number in range(10**6):
                await asyncio.sleep(0.5)
                to, asked = (2, 1)[number % 2], time.monotonic()
                self.flips.append((asked, float("inf"), f"{NAME}@{to}"))
                await asyncio.to_thread(client.promote, NAME, to)
                self.flips[-1] = (asked, time.monotonic(), f"{NAME}@{to}")

    async def run(self, server: Server, connections: int) -> float:
        await self.learn()
        flipping, began = asyncio.create_task(self.flip(server)), time.monotonic()
        await asyncio.gather(*(self.connection() for _ in range(connections)))
        taken = time.monotonic() - began
        flipping.cancel()
        await asyncio.gather(flipping, return_exceptions=True)
        await self.http.aclose()
        return taken


def flips(server: Server, client: Tandem, run: str, options: argparse.Namespace) -> None:
    steps = {f"{NAME}@1": 2, f"{NAME}@2": 6}
    for step in steps.values():
        client.deploy(run, step, name=NAME)
    until(lambda: all(each.ready for each in client.deployment(NAME).revisions))
    load = Load(server, steps, options.requests)
    taken = asyncio.run(load.run(server, options.connections))
    told = sum(a != b for a, b in zip(*load.expected.values(), strict=True))
    promoted = sorted(returned - asked for asked, returned, _ in load.flips if returned < 1e9 + asked)
    rows = [
        ["requests", f"{options.requests:,} over {options.connections} connections in {taken:.0f} s"],
        ["answered by", ", ".join(f"{name}: {count:,}" for name, count in sorted(load.by_revision.items()))],
        ["lost", f"{sum(load.lost.values())} {dict(load.lost) or ''}".strip()],
        ["not of one revision", f"{sum(load.mixed.values())} {dict(load.mixed) or ''}".strip()],
        ["prompts that tell the two apart", f"{told} of {PROMPTS}"],
        ["promotes", f"{len(promoted)}: median {statistics.median(promoted):.3f} s, most {promoted[-1]:.3f} s"],
        ["seconds of a request", f"median {statistics.median(load.seconds):.3f}, most {max(load.seconds):.3f}"],
    ]
    table(["under load", ""], rows)
    client.undeploy(NAME)


# --- sleep


def wakes(server: Server, client: Tandem, run: str, options: argparse.Namespace) -> None:
    trained, rows = server.home / "jobs/runs" / run, list[list[str]]()
    for trial in range(options.wakes):
        began, ready = time.monotonic(), server.home / f"alone{trial}.json"
        words = ["serve", str(trained), "--step", "6", "--port", "0", "--data-dir", str(server.home / "alone")]
        alone = subprocess.Popen(
            [str(server.home / "tandem"), *words, "--ready-file", str(ready)], stdout=subprocess.DEVNULL
        )
        ready_url(ready, alone)
        loaded = time.monotonic() - began
        alone.terminate()
        alone.wait()
        if not trial:
            client.deploy(run, 6, name="sleeper", keep_s=2)
        until(lambda: client.deployment("sleeper").revisions[0].asleep)
        began = time.monotonic()
        woken = httpx.post(
            f"{server.url}/v1/chat/completions", headers={"Authorization": f"Bearer {server.token}"}, timeout=120,
            json={"model": "sleeper", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
        )  # fmt: skip
        taken = time.monotonic() - began
        rows.append([f"{loaded:.1f}", f"{taken:.1f}", f"{taken - loaded:+.1f}", str(woken.status_code)])
    client.undeploy("sleeper")
    table(["`tandem serve` loads, s", "a request that wakes it, s", "more", "status"], rows)


# --- adapters


def adapters(server: Server, client: Tandem, run: str, options: argparse.Namespace) -> None:
    """Time from `deploy` of a further adapter over a running base until the promoted name answers with it."""
    client.deploy(run, 1, name="adapted")
    until(lambda: client.deployment("adapted").revisions[0].ready)
    taken = list[float]()
    for number in range(options.adapters):
        began = time.monotonic()
        made = client.deploy(run, 2 + number % 5, name="adapted").revisions[-1]
        until(lambda n=made.n: client.deployment("adapted").revisions[n - 1].ready)
        client.promote("adapted", made.n)
        told = httpx.post(
            f"{server.url}/v1/chat/completions", headers={"Authorization": f"Bearer {server.token}"}, timeout=60,
            json={"model": "adapted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
        )  # fmt: skip
        taken.append(time.monotonic() - began)
        assert (told.status_code, told.headers["x-tandem-revision"]) == (200, f"adapted@{made.n}")
        assert told.json()["weight_version"] == made.step
    client.undeploy("adapted")
    taken.sort()
    text = f"median {statistics.median(taken):.1f} s, most {taken[-1]:.1f} s"
    table(
        ["an adapter on a running base", "from `deploy` to its answer after `promote`"], [[f"{len(taken)} times", text]]
    )


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--requests", type=int, default=10_000)
    asked.add_argument("--connections", type=int, default=32)
    asked.add_argument("--wakes", type=int, default=3)
    asked.add_argument("--adapters", type=int, default=10)
    options = asked.parse_args()
    note("Deployments: flips under load, and waking")
    with tempfile.TemporaryDirectory() as home:
        server = Server(Path(home))
        try:
            with Tandem(server.url, server.token) as client:
                (environment := Path(home) / "ascii.py").write_text(ENVIRONMENT)
                spec = SPEC | {"environment": {"name": str(environment)}}
                lora = spec | {"model": {"preset": "tiny", "lora": {"rank": 8}}}
                for each, parts in ((spec, (flips, wakes)), (lora, (adapters,))):
                    run = client.submit(each, target="here")
                    ended = run.wait()
                    assert ended.state == "succeeded", ended
                    for part in parts:
                        part(server, client, run.id, options)
        finally:
            server.close()


if __name__ == "__main__":
    main()
