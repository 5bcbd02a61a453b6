"""Test helpers: a rollout service on a real socket in this process, and a client for it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from served import wait_until

from tandem.rollout.queue.queue import RolloutQueue
from tandem.rollout.queue.types import QueueLimits
from tandem.rollout.wire import codec
from tandem.serve.http.httptools_protocol import FastHttp
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import create_app
from tandem.serve.rollouts.service import BODY_BYTES, rollouts_service


class RolloutClient:
    def __init__(self, url: str, token: str, queue: RolloutQueue | None = None) -> None:
        self.url, self.queue, self.epoch = url, queue, 0
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30)

    def send(self, path: str, body: Any, *, key: str | None = None, **headers: str) -> httpx.Response:
        headers = {"Idempotency-Key": key or uuid.uuid4().hex} | headers
        if isinstance(body, bytes):
            return self.http.post(path, content=body, headers={"Content-Type": codec.BINARY} | headers)
        return self.http.post(path, json=body, headers=headers)

    def post(self, path: str, body: Any, **options: Any) -> Any:
        answer = self.send(path, body, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def begin(self, **changes: Any) -> None:
        """A trainer, and environment 1."""
        trainer = {"run_id": "run", "groups_per_step": 4, "max_lag": 1, "num_ids": 1000, "max_tokens": 64}
        self.epoch = self.post("/v2/trainer", trainer | changes)["epoch"]
        self.post("/v2/environments", {"name": "env", "group_size": 2})


@contextmanager
def serving_rollouts(data_dir: Path, *, body_bytes: int = BODY_BYTES, **limits: Any) -> Iterator[RolloutClient]:
    listen = Listen(data_dir)
    queue = RolloutQueue(data_dir, QueueLimits(**({"reserve_bytes": 0} | limits)))
    app = create_app(rollouts_service(queue), token=listen.token(), hosts=listen.hosts, body_bytes=body_bytes)
    server = Server(app, listen, tell=lambda _: None, http=FastHttp)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.url)
        client = RolloutClient(server.url, listen.token(), queue)
        with client.http:
            yield client
    finally:
        server.should_exit = True
        thread.join(timeout=15)
        assert not thread.is_alive()
