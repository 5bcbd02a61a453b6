"""`tandem rollouts serve --atropos --insecure-no-auth` as a process: access, compressed bodies, kills."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from atropos_bodies import encoded, group
from atropos_served import TRAINER, seeds
from served import wait_until

from stopwatch import Stopwatch
from tandem.errors import SpecError
from tandem.recipes import rollout_service
from tandem.recipes.rollout_service import serve_rollouts
from tandem.serve.http.run import Listen
from tandem.serve.http.service import Service

ENVIRONMENT = {"max_token_length": 512, "desired_name": "env", "weight": 1.0, "group_size": 2}


class Process:
    def __init__(self, data_dir: Path) -> None:
        ready = data_dir / "ready.json"
        ready.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "tandem", "rollouts", "serve", "--data-dir", str(data_dir), "--port", "0",
            "--ready-file", str(ready), "--atropos", "--insecure-no-auth",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_until(ready.exists, 30)
        self.token, self.env_id = (data_dir / "token").read_text(), -1
        self.http = httpx.Client(base_url=json.loads(ready.read_text())["url"], timeout=30)

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def send(self, body: bytes, path: str = "/scored_data", **headers: str) -> httpx.Response:
        return self.http.post(path, content=body, headers={"Content-Type": "application/json"} | headers)

    def begin(self, batch_size: int) -> None:
        assert self.http.get("/reset_data").text == "Reset successful"
        assert self.http.post("/register", json=TRAINER | {"batch_size": batch_size}).status_code == 200
        assert self.get("/batch") == {"batch": None}
        self.env_id = self.http.post("/register-env", json=ENVIRONMENT).json()["env_id"]

    @property
    def memory_mb(self) -> float:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096 / 2**20

    def kill(self) -> str:
        """What it said."""
        self.http.close()
        self.process.kill()
        return self.process.communicate()[0]


@pytest.fixture(scope="module")
def _process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    data_dir = tmp_path_factory.mktemp("process")
    processes = [Process(data_dir)]
    yield processes
    assert "require no token" in processes[-1].kill()


@pytest.fixture
def process(_process: list[Process]) -> Process:
    return _process[-1]


@pytest.fixture
def killed(_process: list[Process], tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Process]:
    """kill -9, and the next one over the same directory."""

    def again() -> Process:
        data_dir = Path(_process[-1].process.args[6])  # type: ignore[index]
        _process[-1].kill()
        _process.append(Process(data_dir))
        return _process[-1]

    return again


def test_its_clients_need_no_token_and_everybody_else_does(process: Process):
    process.begin(4)
    assert process.http.get("/v2/status").status_code == 401
    assert process.http.get("/v2/status", headers={"Authorization": f"Bearer {process.token}"}).status_code == 200
    assert process.http.get("/reset_data", headers={"Origin": "http://evil.example"}).status_code == 403
    assert process.http.get("/batch", headers={"Host": "evil.example"}).status_code == 421
    answer = process.http.get("/status", headers={"Origin": str(process.http.base_url).rstrip("/")})
    assert "access-control-allow-origin" not in answer.headers


def test_pages_of_another_local_port_wipe_nothing(process: Process):
    """The GET of an image says no Origin."""
    process.begin(4)
    assert process.send(encoded(env_id=process.env_id, seed=1)).status_code == 200
    for site in ("same-site", "cross-site"):
        for path in ("/reset_data", "/batch", "/"):
            assert process.http.get(path, headers={"Sec-Fetch-Site": site}).status_code == 403
    assert process.get("/status")["queue_size"] == 1
    for site in ("same-origin", "none"):
        assert process.http.get("/status", headers={"Sec-Fetch-Site": site}).status_code == 200


def test_stalled_bodies_keep_no_group_out(process: Process):
    process.begin(4)
    url, head = (
        process.http.base_url,
        "Content-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: 5000",
    )
    with ExitStack() as opened:
        for _ in range(16):
            stalled = opened.enter_context(socket.create_connection((url.host, url.port)))
            stalled.sendall(f"POST /scored_data HTTP/1.1\r\nHost: {url.host}\r\n{head}\r\n\r\n0123456789".encode())
        time.sleep(0.3)
        packed = gzip.compress(encoded(env_id=process.env_id, seed=1))
        assert process.send(packed, **{"Content-Encoding": "gzip"}).status_code == 200


def test_its_clients_are_told_no_4xx_for_a_body_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They would throw the group away; tests/http/test_slow_bodies.py says what patient paths are told."""
    made: list[Service] = []
    monkeypatch.setattr(rollout_service, "create_app", lambda service, **_: made.append(service))
    monkeypatch.setattr(rollout_service, "serve_forever", lambda *_, **__: None)
    serve_rollouts(Listen(tmp_path), atropos=True)
    assert made[0].close is not None
    asyncio.run(made[0].close())  # pyright: ignore[reportArgumentType] - a coroutine
    assert {"/scored_data", "/scored_data_list", "/register-env"} <= made[0].patient_paths
    assert "/v2/groups" not in made[0].patient_paths


def test_nobody_is_let_in_without_a_token_from_elsewhere(tmp_path: Path):
    for listen, atropos in (
        (Listen(tmp_path, host="0.0.0.0", insecure=True), True),
        (Listen(tmp_path), False),
    ):
        with pytest.raises(SpecError, match="--insecure-no-auth"):
            serve_rollouts(listen, atropos=atropos, insecure_no_auth=True)


def test_a_compressed_post_is_the_same_post(process: Process):
    process.begin(4)
    body = encoded(env_id=process.env_id, seed=1)
    answer = process.send(gzip.compress(body), **{"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()) == (200, {"status": "received"})
    later = gzip.compress(body, mtime=1)  # the head of a gzip stream holds the time
    assert process.send(later, **{"Content-Encoding": "gzip"}).status_code == 200
    assert process.send(body).status_code == 200
    assert process.get("/status")["queue_size"] == 1


def test_a_bomb_is_refused_before_it_is_large(process: Process):
    process.begin(4)
    assert process.send(encoded(env_id=process.env_id, seed=1)).status_code == 200
    before = process.memory_mb
    bomb = gzip.compress(b'{"tokens": [[' + b"0," * 2**26, compresslevel=1)
    with Stopwatch() as watch:
        answer = process.send(bomb, **{"Content-Encoding": "gzip"})
    assert (answer.status_code, watch.seconds < 2) == (413, True)
    assert process.memory_mb - before < 300
    cut = process.send(gzip.compress(encoded(env_id=process.env_id, seed=2))[:-9], **{"Content-Encoding": "gzip"})
    assert (cut.status_code, "field" in cut.json()["error"]) == (422, True)
    assert process.get("/status")["queue_size"] == 1


def test_a_kill_loses_no_acknowledged_group_and_the_run_goes_on(process: Process, killed: Callable[[], Process]):
    process.begin(4)
    for seed in range(50):
        assert process.send(encoded(env_id=process.env_id, seed=seed)).status_code == 200
    assert len(process.get("/batch")["batch"]) == 2
    assert seeds(process.get("/batch")["batch"]) == [group(seed=seed)["scores"][0] for seed in (2, 3)]
    env_id, process = process.env_id, killed()
    assert process.get("/info") == {"batch_size": 4, "max_token_len": 512}
    assert process.get("/status") == {"current_step": 1, "queue_size": 46}
    again = process.send(encoded(env_id=env_id, seed=49))  # repeated by a client that saw no answer
    assert (again.status_code, process.get("/status")["queue_size"]) == (200, 46)
    known = process.send(encoded(env_id=env_id, seed=99))  # by the environment that was registered before
    assert known.status_code == 200
    assert process.get(f"/status-env?env_id={env_id}")["self_queue_size"] == 47
    seen = [seeds(process.get("/batch")["batch"]) for _ in range(23)]
    assert [each for batch in seen for each in batch] == [group(seed=seed)["scores"][0] for seed in range(4, 50)]
    assert process.get("/status") == {"current_step": 24, "queue_size": 1}


def test_their_environments_feed_a_trainer_of_ours(process: Process):
    assert process.http.get("/reset_data").status_code == 200
    headers = {"Authorization": f"Bearer {process.token}"}

    def ours(path: str, **body: Any) -> Any:
        key = {"Idempotency-Key": f"{path}-{time.monotonic_ns()}"}
        answer = process.http.post(f"/v2/{path}", json=body, headers=headers | key)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    epoch = ours("trainer", run_id="ours", groups_per_step=2, max_lag=1, version=3)["epoch"]
    assert process.http.post("/register", json=TRAINER).status_code == 409
    environment = process.http.post("/register-env", json=ENVIRONMENT).json()
    assert (environment["status"], environment["starting_step"]) == ("success", 3)
    process.env_id = environment["env_id"]
    assert process.get("/info") == {"batch_size": 4, "max_token_len": -1}
    assert process.send(encoded(env_id=process.env_id, seed=1)).status_code == 200
    missing = process.send(encoded(env_id=process.env_id, seed=2, inference_logprobs=None))
    assert (missing.status_code, missing.json()["error"]["field"]) == (422, "inference_logprobs")
    ours("trainer/version", epoch=epoch, version=4)
    assert process.send(encoded(env_id=process.env_id, seed=3)).status_code == 200
    assert process.get(f"/status-env?env_id={process.env_id}")["current_step"] == 4
    lease = ours("leases", epoch=epoch, groups=2)
    assert [each["lag"] for each in lease["groups"]] == [1, 0], "no version is known: their age counts from the post"
    first = lease["groups"][0]["group"]
    assert first["trajectories"][0]["ids"] == group(seed=1)["tokens"][0]
    assert first["trajectories"][0]["spans"] == [[-1, 4], [-2, 8]]
    assert process.get("/batch")["status"] == "error"
