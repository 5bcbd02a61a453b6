"""The rollout service is killed under load, again and again: `make rollouts-kills`. Nothing acknowledged may be lost.

Posters send groups with names, some on tickets, and repeat a post under its key until it is answered. A trainer takes
batches, checkpoints the names in them, acknowledges; it too is killed now and then, between any two of these, and goes
on from its checkpoint with a new registration. At the end the queue is drained. Then every name that was acknowledged
must be in the checkpoint, and no name twice. Exit code 1 otherwise.

python benchmarks/rollouts_kills.py [--kills 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import table
from rollouts import Service, temporary
from tandem.rollout.remote import lease_codec
from tandem.rollout.wire import codec
from tandem.types import Trajectory

Headers = dict[str, str]
JSON = "application/json"
NEVER_ANSWERED = (ConnectionError, http.client.HTTPException, TimeoutError, OSError)


@dataclass
class Told:
    """What clients saw, and what the trainer's checkpoint holds."""

    acknowledged: set[str] = field(default_factory=set)
    trained: Counter[str] = field(default_factory=Counter)
    again: int = 0
    """Requests that were repeated."""
    trainer_kills: int = 0
    serving_s: list[float] = field(default_factory=list)
    posting: bool = True
    draining: bool = False
    problems: list[str] = field(default_factory=list)


class Calls:
    """Requests that are repeated until they are answered, by whichever server there is."""

    def __init__(self, place: list[Service], told: Told) -> None:
        self.place, self.told = place, told
        self.connection: http.client.HTTPConnection | None = None
        self.service: Service | None = None

    def post(self, path: str, body: bytes | dict[str, Any], *, accept: str = JSON) -> tuple[int, bytes]:
        kind, content = (codec.BINARY, body) if isinstance(body, bytes) else (JSON, json.dumps(body).encode())
        headers = {"Content-Type": kind, "Accept": accept, "Idempotency-Key": uuid.uuid4().hex}
        while True:
            try:
                return self._once(path, content, headers)
            except NEVER_ANSWERED:
                self.close()
                self.told.again += 1
                time.sleep(0.02)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def _once(self, path: str, content: bytes, headers: Headers) -> tuple[int, bytes]:
        service = self.place[0]
        if self.connection is None or service is not self.service:
            self.close()
            self.service = service
            self.connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
        token = {"Authorization": f"Bearer {service.token}"}
        self.connection.request("POST", path, content, headers | token)
        answer = self.connection.getresponse()
        return answer.status, answer.read()


def group(name: str, **head: Any) -> bytes:
    one = Trajectory([1, 2, 3, 4], [False, True, True, True], [0.0, -1.0, -1.0, -1.0], [-1, 0, 0, 0], task_id=name)
    return bytes(codec.encode([one, one], environment=1, **head).frame)


def poster(place: list[Service], told: Told, number: int) -> None:
    calls, rng, count = Calls(place, told), random.Random(number), 0
    while told.posting:
        names = [f"{number}-{count + k}" for k in range(rng.choice((1, 1, 4)))]
        count += len(names)
        ticket: dict[str, int] = {}
        if number % 2:
            status, answer = calls.post("/v2/tickets", {"environment": 1, "wait_s": 0.5})
            tickets = json.loads(answer)["tickets"] if status == 200 else []
            names, ticket = names[:1], {"ticket": tickets[0]} if tickets else {}
        status, answer = calls.post("/v2/groups", b"".join(group(name, **ticket) for name in names))
        if status == 200:
            told.acknowledged.update(names)
        elif status == 429:
            time.sleep(0.05)
        elif not (status == 409 and ticket):  # the trainer was away for so long that the ticket lapsed
            told.problems.append(f"a post was answered {status}: {answer[:200]!r}")
            break
    calls.close()


class Trainer:
    def __init__(self, place: list[Service], told: Told, seed: int) -> None:
        self.calls, self.told, self.rng = Calls(place, told), told, random.Random(seed)
        self.checkpoint: set[int] = set()
        self.epoch, self.empty = 0, 0

    def run(self) -> None:
        self.register()
        while self.empty < 5:
            self.step()
        self.calls.close()

    def register(self) -> None:
        spec = {"run_id": "kills", "groups_per_step": 8, "max_lag": 3, "max_dropped": 0}
        _, answer = self.calls.post("/v2/trainer", spec)
        self.epoch = json.loads(answer)["epoch"]
        self.calls.post("/v2/ack", {"epoch": self.epoch, "groups": sorted(self.checkpoint)[-64:]})

    def step(self) -> None:
        count = 1 if self.told.draining else 8
        status, answer = self.calls.post(
            "/v2/leases", {"epoch": self.epoch, "groups": count, "wait_s": 0.3}, accept=codec.BINARY
        )
        if status == 204:
            self.empty += self.told.draining  # nothing came for a while: it is drained
            return
        if status != 200:
            self.told.problems.append(f"a batch was answered {status}: {answer[:200]!r}")
            self.empty = 99
            return
        self.empty = 0
        lease = lease_codec.decode_lease(answer)
        if self.killed():
            return
        for each in lease.groups:  # the step, and the checkpoint that holds it
            self.told.trained[codec.decode(each.frame)[0].task_id] += 1
            self.checkpoint.add(each.id)
        if self.killed():
            return
        self.calls.post("/v2/release", {"epoch": self.epoch, "count": count})
        if self.killed():
            return
        self.calls.post("/v2/ack", {"epoch": self.epoch, "leases": [lease.id]})

    def killed(self) -> bool:
        """All that is not in the checkpoint is gone; the next one begins from there."""
        if self.rng.random() > 0.02:
            return False
        self.told.trainer_kills += 1
        self.register()
        return True


def trial(directory: Path, *, kills: int, seed: int, every_s: tuple[float, float] = (0.05, 0.6)) -> Told:
    told, rng = Told(), random.Random(seed)
    place = [Service(directory)]
    trainer = Trainer(place, told, seed)
    trainer.register()
    trainer.calls.post("/v2/environments", {"name": "kills", "lapse_s": 30})
    trainer.calls.close()
    threads = [threading.Thread(target=poster, args=(place, told, number), daemon=True) for number in range(4)]
    threads.append(threading.Thread(target=trainer.run, daemon=True))
    for thread in threads:
        thread.start()
    for _ in range(kills):
        time.sleep(rng.uniform(*every_s))
        place[0].kill()
        place[0] = Service(directory)
        told.serving_s.append(place[0].seconds_to_serve)
    told.posting = False
    for thread in threads[:-1]:
        thread.join(30)
    told.draining = True
    threads[-1].join(60)
    if any(thread.is_alive() for thread in threads):
        told.problems.append("a client hangs")
    place[0].__exit__()
    return told


def verdict(told: Told) -> tuple[list[list[str]], bool]:
    lost = told.acknowledged - told.trained.keys()
    twice = [name for name, times in told.trained.items() if times > 1]
    p50, slowest = statistics.median(told.serving_s), max(told.serving_s)
    rows = [
        ["kills of the service", str(len(told.serving_s)), ""],
        ["kills of the trainer", str(told.trainer_kills), ""],
        ["groups acknowledged", str(len(told.acknowledged)), ""],
        ["requests repeated", str(told.again), ""],
        ["acknowledged and lost", str(len(lost)), "0"],
        ["trained on twice, or queued twice", str(len(twice)), "0"],
        ["from start to serving, median", f"{p50:.2f} s", "2"],
        ["from start to serving, slowest", f"{slowest:.2f} s", "5"],
        ["problems", "; ".join(told.problems[:3]) or "none", "none"],
    ]
    return rows, not (lost or twice or told.problems or p50 > 2 or slowest > 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with temporary() as directory:
        rows, good = verdict(trial(directory, kills=asked.kills, seed=asked.seed))
    table(["the rollout service under kill -9", "measured", "must be"], rows)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
