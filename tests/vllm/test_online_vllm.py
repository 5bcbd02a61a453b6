"""`tandem online serve` with a real vLLM: taught while it answers, gone back to, and serving what was proven."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from vllm_cpu import PYTHON, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from online_common import OnlineServer, fact

SPEC = """
device = "cpu"
[model]
preset = "tiny"
[precision]
weights = "bfloat16"
[train]
lr = 1e-3
steps = 4
[gates]
kl = 50.0
update_norm = 0.5
[engine]
kind = "vllm"
python = "{python}"
eager = true
max_context = 256
{more}
"""
FULL = '[optimizer]\nkind = "apollo"\ntables = "adamw_8bit"'


def served_as_proven(server: OnlineServer) -> tuple[int, str]:
    held, told = server.get("/versions/served"), server.get("/versions")
    proven = {row["version"]: row["served_digest"] for row in told["versions"]}
    assert held["version"] == told["active"]
    assert held["digest"] == proven[held["version"]]
    return held["version"], held["digest"]


def of_vllm(server: OnlineServer) -> int:
    """The process that the server started for it."""
    assert server.process is not None
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    children = [each for path in threads for each in path.read_text().split()]
    found = {int(each) for each in children if b"--uds" in Path(f"/proc/{each}/cmdline").read_bytes()}
    assert len(found) == 1
    return found.pop()


def test_a_vllm_that_is_killed_is_started_again_with_what_was_served(tmp_path: Path):
    server = OnlineServer(tmp_path, SPEC.format(python=PYTHON, more=FULL))
    try:
        server.start(300)
        assert server.wait(server.teach([fact(1)]))["state"] == "published"
        served, trainer = served_as_proven(server), server.get("/train/status")["trainer"]["pid"]
        killed = of_vllm(server)
        os.kill(killed, 9)
        until = time.monotonic() + 120
        while server.http.get("/health").status_code == 200:
            assert time.monotonic() < until
        taught = server.teach([fact(2)])
        row = server.wait(taught, 240)
        assert (row["state"], row["why"]) == ("published", "")
        status = server.get("/train/status")
        assert status["engine"] == {"alive": True, "restarts": 1, "why": ""}
        assert (status["trainer"]["pid"], status["trainer"]["restarts"]) == (trainer, 0)
        assert of_vllm(server) != killed
        assert server.http.get("/health").status_code == 200
        server.post(f"/versions/{served[0]}/activate")
        assert served_as_proven(server) == served
    finally:
        server.kill()


@pytest.mark.parametrize("more", [FULL, "[model.lora]\nrank = 4"], ids=["full", "lora"])
def test_it_learns_while_it_answers_and_goes_back(tmp_path: Path, more: str):
    server, answers, end = OnlineServer(tmp_path, SPEC.format(python=PYTHON, more=more)), list[Any](), threading.Event()

    def ask(number: int) -> None:
        while not end.is_set():
            answers.append(server.ask(f"{number}?", max_tokens=24, temperature=1.0))

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    try:
        server.start(300)
        for thread in asking:
            thread.start()
        for _ in range(3):
            row = server.wait(server.teach([fact(n) for n in range(8)]))
            assert row["state"] == "published", row["why"]
        end.set()
        for thread in asking:
            thread.join(60)
        assert answers
        for answer in answers:
            versions, counts = zip(*answer["choices"][0]["weight_versions"], strict=True)
            assert set(versions) <= {0, 1, 2, 3}
            assert list(versions) == sorted(versions)
            assert more == FULL or len(versions) == 1  # it ends with the adapter that it began with
            assert sum(counts) == answer["usage"]["completion_tokens"]
        version, last = served_as_proven(server)
        assert version == 3
        server.post("/versions/1/activate")
        version, first = served_as_proven(server)
        assert (version, first != last) == (1, True)
        server.post("/versions/3/activate")
        assert served_as_proven(server) == (3, last)
        ((version, _),) = server.ask("3?", max_tokens=4)["choices"][0]["weight_versions"]
        assert version == 3
        base = server.get("/train/status")["trainer"]["base"]
        assert (
            base == {}
            if more == FULL
            else (base["engaged"], "only GPU memory can be shared" in base["why_not"]) == (False, True)
        )
    finally:
        end.set()
        server.kill()
