"""`tandem rollouts serve` as a process: where it listens, what it refuses, how it ends."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

import httpx
import pytest
from served import wait_until

from tandem.errors import SpecError
from tandem.recipes.rollout_service import serve_rollouts
from tandem.serve.http.run import Listen


@contextmanager
def started(data_dir: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, str]]:
    ready = data_dir / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tandem", "rollouts", "serve", "--data-dir", str(data_dir), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--ready-file", str(ready), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, 60)
        assert ready.exists(), process.communicate()
        said = json.loads(ready.read_text())
        with httpx.Client(base_url=said["url"]) as client:
            yield process, client, Path(said["token_file"]).read_text()
    finally:
        process.kill()
        process.communicate()


def test_it_serves_is_the_only_owner_and_ends_in_peace(tmp_path: Path):
    with started(tmp_path) as (process, client, token):
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/v2/status").status_code == 401
        assert client.get("/v2/status", headers={"Authorization": f"Bearer {token}"}).status_code == 200
        assert client.post("/register", headers={"Authorization": f"Bearer {token}"}, json={}).status_code == 404
        second = subprocess.run(
            [sys.executable, "-m", "tandem", "rollouts", "serve", "--data-dir", str(tmp_path), "--port", "0"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 1
        assert f"belongs to process {process.pid}" in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_take_that_waits_when_it_ends_is_told_so(tmp_path: Path):
    with started(tmp_path) as (process, client, token):
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "begin", "Content-Type": "application/json"}
        begun = client.post("/v2/trainer", json={"run_id": "run", "groups_per_step": 1}, headers=headers)
        taking = {"epoch": begun.json()["epoch"], "groups": 1, "wait_s": 60}
        with closing(http.client.HTTPConnection(str(client.base_url.netloc, "ascii"), timeout=30)) as waiting:
            waiting.request("POST", "/v2/leases", json.dumps(taking), headers | {"Idempotency-Key": "take"})
            assert client.get("/health").status_code == 200  # asked later, so the other was read
            process.send_signal(signal.SIGTERM)
            answer = waiting.getresponse()
            said = json.loads(answer.read())
        assert process.wait(10) == 0
        assert (answer.status, said["error"]["code"]) == (503, "unavailable")
        assert answer.headers["connection"] == "close"
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("option", "where"),
    [
        ("--data-dir", "file"), ("--data-dir", "file/under"), ("--ready-file", "missing/ready.json"),
        ("--ready-file", "file/ready.json"), ("--ready-file", "directory"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, option: str, where: str):
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    place = tmp_path / where
    options = {"--data-dir": tmp_path / "data", "--port": 0} | {option: place}
    command = [sys.executable, "-m", "tandem", "rollouts", "serve", *map(str, chain(*options.items()))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    assert f"{option} = '{place}'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_only_what_atropos_clients_call_is_open_and_only_where_both_were_asked_for(tmp_path: Path):
    with started(tmp_path, "--atropos") as (_, client, _):
        assert client.get("/status").status_code == 401
        assert_root_is_a_greeting_and_for_browsers_a_page(client)
    with started(tmp_path, "--atropos", "--insecure-no-auth") as (process, client, _):
        assert_root_is_a_greeting_and_for_browsers_a_page(client)
        assert client.get("/status").status_code == 200
        assert client.get("/v2/status").status_code == 401
        assert client.get("/status", headers={"Host": "evil.example"}).status_code == 421
        process.terminate()
        said = process.communicate(timeout=10)
        assert "clear the queue" in said[0] + said[1]


def assert_root_is_a_greeting_and_for_browsers_a_page(client: httpx.Client) -> None:
    assert client.get("/").json() == {"message": "Tandem rollouts, as AtroposLib API"}
    page = client.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'sha256-" in page.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("host", "atropos"), [("127.0.0.1", False), ("0.0.0.0", True)], ids=["without atropos", "for all the world"]
)
def test_no_auth_is_refused_where_nobody_needs_it(tmp_path: Path, host: str, atropos: bool):
    listen = Listen(tmp_path, host, insecure=True)
    with pytest.raises(SpecError, match="--insecure-no-auth"):
        serve_rollouts(listen, atropos=atropos, insecure_no_auth=True)
