"""A server whose model votes on its version (tests/voting_model.py), taught hundreds of times while streams ask it: is
any token made of two versions, or stamped with another version than made it?

All is the server's own (HTTP, jobs, gates, files, bridge, engine); only the step of the trainer process is another: it
writes the next version's votes. Beside the torn tokens: how long a stream waits at most for its next token where an
update came, against where none did. Exit code 1 if a token is torn.

python benchmarks/online_torn.py [--publishes 500] [--streams 8] [--pinned] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

from online_common import Asking, OnlineServer, events

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

TOKENS = 200


# --- the trainer process: a step votes


def trainer(fd: int) -> None:
    import voting_model as votes
    from tandem.build import online as build_online
    from tandem.online.publishing import EngineProxy
    from tandem.online.rpc import RpcConnection
    from tandem.online.trainer_worker import TrainerParts, TrainerWorker

    class Votes:
        def __init__(self, parts: TrainerParts, version: int) -> None:
            self.parts, self.version = parts, version

        def step(self, batch: Any) -> dict[str, float]:
            votes.write(dict(self.parts.policy.trainable()), self.version)
            return {"loss/total": 0.0}

    async def serve() -> None:
        def make_parts(spec: Any) -> TrainerParts:
            parts = build_online.parts(spec, EngineProxy(server.call, 1))
            # A job says by its seed which version it will be.
            make = lambda algorithm, teaching, version: Votes(parts, teaching.seed)  # noqa: E731
            return dataclasses.replace(parts, trainer=make)

        server = RpcConnection(lambda what: worker.handle(what), "server process")
        worker = TrainerWorker(make_parts, server.notify)
        await server.start(socket.socket(fileno=fd))
        await server.gone.wait()
        os._exit(0)

    asyncio.run(serve())


def server(home: Path) -> None:
    """The server process, with that trainer process."""
    from tandem.recipes import online
    from tandem.serve.http.run import Listen
    from tandem.spec.online import parse_online_spec

    online._TRAINER = (sys.executable, __file__, "--trainer")  # pyright: ignore[reportPrivateUsage]
    spec = parse_online_spec(
        {
            "name": "votes",
            "device": "cpu",
            "model": {"path": str(home / "model")},
            "train": {"steps": 1},
            "gates": {"kl_prompts": 0, "update_norm": 10.0},
            "replay": {"share": 0.0},
            "updates": {"anchor_every": 100, "anchor_share": 1000.0},
        }
    )
    data = home / "data"
    online.serve_online(spec, Listen(data, ready_file=data / "ready.json"))


# --- the load


class Stream(Asking):
    def __init__(self, url: str, token: str, number: int, on_update: str) -> None:
        super().__init__(httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=120), number)
        self.on_update = on_update
        self.tokens = self.torn = self.crossing = self.answers = 0
        self.waits_s: list[tuple[float, bool]] = []

    def ask(self) -> None:
        import voting_model as votes

        prompt = [self.number + 1] * (4 + self.answers % 5)
        body: dict[str, Any] = {"model": "votes", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}
        body |= {"stream": True, "return_token_ids": True}
        if self.on_update:
            body["on_update"] = self.on_update
        ids, version, spans, last = list[int](), -1, list[list[int]](), time.perf_counter()
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for told in events(answer):
                now = time.perf_counter()
                if ids:
                    self.waits_s.append((now - last, told["weight_version"] != version))
                last, version = now, told["weight_version"]
                ids += told["choices"][0]["token_ids"]
                spans = told["choices"][0].get("weight_versions", spans)
        stamps = [version for version, count in spans for _ in range(count)]
        assert len(stamps) == len(ids)
        self.torn += sum(not votes.speaks_for(token, stamp) for token, stamp in zip(ids, stamps, strict=True))
        self.tokens += len(ids)
        self.crossing += len(spans) > 1
        self.answers += 1


def measure(home: Path, publishes: int, streams: int, on_update: str = "") -> dict[str, Any]:
    import voting_model as votes

    votes.save(home / "model")
    here = OnlineServer(home, "")
    here.command = [sys.executable, __file__, "--server", str(home)]
    here.start()
    url, token = str(here.http.base_url), (here.data_dir / "token").read_text()
    load = [Stream(url, token, number, on_update) for number in range(streams)]
    started = time.perf_counter()
    try:
        for each in load:
            each.start()
        sample = {"context_ids": [1, 2], "continuation_ids": [3]}
        for number in range(1, publishes + 1):
            key = uuid.uuid4().hex
            row = here.wait(here.teach([sample], key, seed=number))
            if row["state"] != "published" or row["version"] != number:
                raise RuntimeError(f"job {number}: {row['state']} {row['why']}, version {row['version']}: {here.log()}")
    finally:
        for each in load:
            each.ended.set()
        for each in load:
            each.join()
        here.kill()
    if errors := [each.error for each in load if each.error]:
        raise RuntimeError(f"{errors}: {here.log()}")
    waits = [wait for each in load for wait in each.waits_s]
    plain = sorted(seconds for seconds, updated in waits if not updated)
    updated = sorted(seconds for seconds, updated in waits if updated)
    at = lambda values, share: 1000 * values[int(share * (len(values) - 1))] if values else None  # noqa: E731
    return {
        "publishes": publishes,
        "torn_tokens": sum(each.torn for each in load),
        "tokens": sum(each.tokens for each in load),
        "answers": sum(each.answers for each in load),
        "answers_across_updates": sum(each.crossing for each in load),
        "token_ms": {"p50": at(plain, 0.5), "p99": at(plain, 0.99)},
        "token_after_update_ms": {"p50": at(updated, 0.5), "p99": at(updated, 0.99), "max": at(updated, 1.0)},
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--publishes", type=int, default=500)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trainer", type=int)
    parser.add_argument("--server", type=Path)
    options = parser.parse_args()
    if options.trainer is not None:
        return trainer(options.trainer)
    if options.server is not None:
        return server(options.server)
    with tempfile.TemporaryDirectory() as home:
        told = measure(Path(home), options.publishes, options.streams, "pin" if options.pinned else "")
    print(json.dumps(told) if options.json else "\n".join(f"{name:24} {value}" for name, value in told.items()))
    sys.exit(told["torn_tokens"] > 0)


if __name__ == "__main__":
    main()
