"""Test helpers: a rollout service with the Atropos endpoints on a socket, and a client for it."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from atropos_bodies import encoded
from served import wait_until

from tandem.rollout.atropos.service import Atropos
from tandem.rollout.atropos.version_lookup import GatewayStamps
from tandem.rollout.queue.queue import RolloutQueue
from tandem.serve.http.httptools_protocol import FastHttp
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import Service, create_app
from tandem.serve.rollouts.atropos_routes import atropos_routes
from tandem.serve.rollouts.service import rollouts_service

TRAINER = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 8, "max_token_len": 512, "checkpoint_dir": "c",
    "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 100,
}  # fmt: skip


@dataclass
class Client:
    """Says what its clients say, as they say it."""

    http: httpx.Client
    atropos: Atropos
    server: Server

    def get(self, path: str, body: Any = None) -> Any:
        answer = self.http.request("GET", path, json=body) if body is not None else self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def send(self, body: bytes, path: str = "/scored_data", *, zipped: bool = False) -> httpx.Response:
        headers = {"Content-Type": "application/json"} | ({"Content-Encoding": "gzip"} if zipped else {})
        return self.http.post(path, content=gzip.compress(body) if zipped else body, headers=headers)

    def begin(self, **changes: Any) -> None:
        self.post("/register", TRAINER | changes)
        assert self.get("/batch") == {"batch": None}

    def join(self, name: str = "env", group_size: int = 2, **changes: Any) -> int:
        body = {"max_token_length": 512, "desired_name": name, "weight": 1.0, "group_size": group_size} | changes
        return self.post("/register-env", body)["env_id"]

    def put(self, **changes: Any) -> Any:
        answer = self.send(encoded(**changes))
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def serving_atropos(
    data_dir: Path, *, may_reset: bool = True, gateway: GatewayStamps | None = None, open_to_all: bool = False
) -> Iterator[Client]:
    listen = Listen(data_dir)
    queue = RolloutQueue(data_dir)
    atropos = Atropos(queue, data_dir, gateway)
    hot, router = atropos_routes(atropos, may_reset=may_reset)
    router.include_router((native := rollouts_service(queue)).router)
    paths = {"/scored_data"} if open_to_all else set[str]()
    service = Service(
        "tandem rollouts serve", router, hot=[*hot, *native.hot], close=queue.close, open_paths=frozenset(paths)
    )
    app = create_app(service, token=listen.token(), hosts=listen.hosts)
    server = Server(app, listen, tell=lambda _: None, http=FastHttp)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.url)
        headers = {"Authorization": f"Bearer {listen.token()}"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=30) as http:
            yield Client(http, atropos, server)
    finally:
        server.should_exit = True
        thread.join(timeout=15)
        assert not thread.is_alive()


def sequences(batch: list[dict[str, Any]]) -> int:
    return sum(len(group["tokens"]) for group in batch)


def seeds(batch: list[dict[str, Any]]) -> list[float]:
    """What tells one group from another."""
    return [group["scores"][0] for group in batch]


def loads(body: bytes) -> Any:
    return json.loads(body)
