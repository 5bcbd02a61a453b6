"""How long 8 streams wait for their tokens while the server learns, against while it does not; and how long the engine
pauses for an update.

Learning and not learning take turns, so that whatever else runs on the machine meets both. One thread for the engine in
both, one for the trainer process. Between tokens of one stream lies one iteration of the engine, so the pause is told
in iterations, too.

python benchmarks/online_latency.py [--preset small] [--rounds 6] [--seconds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from online_common import OnlineServer, fact

STREAMS = 8
SPEC = """
name = "online"
device = "cpu"
[model]
preset = "{preset}"
[train]
lr = 1e-5
[gates]
kl_prompts = 0
[replay]
share = 0.0
[updates]
anchor_every = 1000
anchor_share = 1000.0
"""


class Streams:
    """8 of them without pause; every wait between two events of one, with the moment."""

    def __init__(self, server: OnlineServer) -> None:
        self.waits: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._server = server
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(STREAMS)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        http = self._server.http
        body = {"model": "online", "prompt": [65 + number] * 16, "max_tokens": 200, "temperature": 2.0, "stream": True}
        with httpx.Client(base_url=http.base_url, headers=http.headers, timeout=60) as client:
            while not self._end.is_set():
                last = time.perf_counter()
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            now = time.perf_counter()
                            self.waits.append((now, now - last))
                            last = now
                        if self._end.is_set():
                            break


class Updates(threading.Thread):
    """What the engine said of each flip."""

    def __init__(self, server: OnlineServer) -> None:
        super().__init__(daemon=True)
        self.seconds: list[dict[str, float]] = []
        self._http = server.http

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._http.base_url, headers=self._http.headers, timeout=None) as client:
                with client.stream("GET", "/train/events") as events:
                    kind = ""
                    for line in events.iter_lines():
                        kind = line[7:] if line.startswith("event: ") else kind
                        if line.startswith("data: ") and kind == "version":
                            self.seconds.append(json.loads(line[6:])["seconds"])
        except httpx.HTTPError:  # the server has ended
            return


def measure(home: Path, preset: str, rounds: int, seconds: float) -> dict[str, Any]:
    server = OnlineServer(home, SPEC.format(preset=preset)).start()
    load = os.getloadavg()[0]
    try:
        updates = Updates(server)
        updates.start()
        samples = [fact(n) for n in range(16)]
        server.wait(server.teach(samples, steps=2))  # the first update brings the bridge up
        spells: list[tuple[str, float, float]] = []
        with Streams(server) as streams:
            time.sleep(2)
            for number in range(2 * rounds):
                kind = "learning" if number % 2 else "quiet"
                started = time.perf_counter()
                while time.perf_counter() - started < seconds:
                    if kind == "learning":
                        server.wait(server.teach(samples, steps=8))
                    else:
                        time.sleep(0.1)
                spells.append((kind, started, time.perf_counter()))
        told: dict[str, Any] = {"preset": preset, "streams": STREAMS, "load_before": load}
        for kind in ("quiet", "learning"):
            inside = [(begin, end) for each, begin, end in spells if each == kind]
            waits = sorted(1000 * wait for at, wait in streams.waits if any(b <= at <= e for b, e in inside))
            told[kind] = {f"p{share}_ms": waits[int(share / 100 * (len(waits) - 1))] for share in (50, 99)}
            told[kind] |= {"max_ms": waits[-1], "tokens_per_s": len(waits) / sum(end - begin for begin, end in inside)}
        told["p99_ratio"] = told["learning"]["p99_ms"] / told["quiet"]["p99_ms"]
        pauses = sorted(1000 * (each["pause"] + each["apply"]) for each in updates.seconds[1:])
        told["updates"] = len(pauses)
        told["pause_ms"] = {"p50": pauses[len(pauses) // 2], "max": pauses[-1]} if pauses else {}
        return told
    finally:
        server.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="small")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        told = measure(Path(home), options.preset, options.rounds, options.seconds)
    print(json.dumps(told) if options.json else "\n".join(f"{name:12} {value}" for name, value in told.items()))


if __name__ == "__main__":
    main()
