"""How a service starts and ends."""

from __future__ import annotations

import gc
import json
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from served import MODEL, wait_until

from tandem.errors import SpecError
from tandem.serve.http.run import Listen, Server, serve_forever

PROGRAM = str(Path(__file__).with_name("serve_script.py"))
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}


@contextmanager
def started(directory: Path, pause_s: float) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], httpx.Client]]:
    ready_file = directory / "ready.json"
    ready_file.write_text("stale")
    command = [sys.executable, PROGRAM, str(directory / "data"), str(ready_file), str(pause_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: ready_file.exists() and ready_file.read_text() != "stale", seconds=60)
        ready = json.loads(ready_file.read_text())
        headers = {"Authorization": f"Bearer {Path(ready['token_file']).read_text()}"}
        with httpx.Client(base_url=ready["url"], headers=headers, timeout=20) as client:
            yield process, ready, client
    finally:
        process.kill()
        process.communicate()


def test_sigterm_lets_short_answers_end_and_exits_0(tmp_path: Path) -> None:
    with started(tmp_path, pause_s=0.01) as (process, ready, client):
        assert ready.keys() == {"url", "pid", "token_file"}
        assert ready["pid"] == process.pid
        assert stat.S_IMODE(Path(ready["token_file"]).stat().st_mode) == 0o600
        assert client.get("/v1/models").status_code == 200
        with client.stream("POST", "/v1/chat/completions", json=BODY) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert process.wait(timeout=10) == 0
        assert process.stdout is not None
        assert "listens at http://127.0.0.1:" in process.stdout.read()


def test_ctrl_c_cuts_long_answers_within_10_s_as_sigterm_does(tmp_path: Path) -> None:
    with started(tmp_path, pause_s=1.0) as (process, _, client):
        with client.stream("POST", "/v1/chat/completions", json=BODY) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            began = time.monotonic()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
            assert process.wait(timeout=10) == 0
            assert time.monotonic() - began < 9
            assert process.stdout is not None
            assert "Traceback" not in process.stdout.read()


def test_the_collector_leaves_alone_what_was_there_when_a_service_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(Server, "run", lambda _: frozen.append(gc.get_freeze_count()))
    try:
        serve_forever(FastAPI(), Listen(tmp_path))
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000


def test_an_answer_in_two_writes_does_not_wait_for_an_acknowledgement(tmp_path: Path) -> None:
    with Server(FastAPI(), Listen(tmp_path), print)._socket() as listening:
        client = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
        with client, accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_token_lives_as_long_as_its_directory_and_only_in_private(tmp_path: Path) -> None:
    token = Listen(tmp_path / "data").token()
    assert Listen(tmp_path / "data").token() == token
    assert len(token) >= 32
    (tmp_path / "data" / "token").chmod(0o644)
    assert Listen(tmp_path / "data").token() != token
    assert stat.S_IMODE((tmp_path / "data" / "token").stat().st_mode) == 0o600


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_a_public_bind_is_refused_unless_insecure(tmp_path: Path, host: str) -> None:
    with pytest.raises(SpecError, match="--insecure"):
        Listen(tmp_path, host=host)
    assert Listen(tmp_path, host=host, insecure=True).hosts is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_hosts_need_no_leave(tmp_path: Path, host: str) -> None:
    assert Listen(tmp_path, host=host).hosts == {"127.0.0.1", "localhost", "[::1]"}


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    from fastapi import FastAPI

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SpecError, match=f"--port = {port}"):
            Server(FastAPI(), Listen(tmp_path, port=port), tell=print).run()
