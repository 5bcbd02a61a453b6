"""Environments and trainer of unmodified atroposlib 0.4.0 against `tandem rollouts serve --atropos`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.rollout.atropos.codec import KEYS
from tandem.text.tokenizer import byte_tokenizer

HERE = Path(__file__).parent


class Serving:
    """The service as a process, killed and started again over the same directory."""

    def __init__(self, data_dir: Path, port: int = 0) -> None:
        ready = data_dir.with_suffix(".json")
        ready.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "tandem", "rollouts", "serve", "--data-dir", str(data_dir), "--port", str(port),
            "--ready-file", str(ready), "--atropos", "--insecure-no-auth",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.url = json.loads(ready.read_text())["url"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error) | {"self_queue_size": 0}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.fixture
def begin(atropos_python: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []

    def beginning(program: str, *arguments: object) -> subprocess.Popen[str]:
        command = [atropos_python, str(HERE / program), *map(str, arguments)]
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        return begun[-1]

    yield beginning
    for process in begun:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def serving(data_dir: Path) -> Iterator[list[Serving]]:
    servers = [Serving(data_dir)]
    try:
        yield servers
    finally:
        servers[-1].kill()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def batches(trainer: subprocess.Popen[str], count: int) -> Iterator[dict[str, Any]]:
    assert trainer.stdout is not None
    while count and (line := trainer.stdout.readline()):
        if line.startswith("BATCH "):
            count -= 1
            yield json.loads(line.removeprefix("BATCH "))
    assert count == 0, "the trainer ended"


def test_two_environments_of_other_sizes_feed_a_trainer(tmp_path: Path, tokenizer: str, begin: Any):
    with serving(tmp_path / "data") as (server,):
        trainer = begin("plain_trainer.py", server.url, 6, 4, 4)
        begin("counting_env.py", server.url, tokenizer, "four", 4, 50)
        begin("counting_env.py", server.url, tokenizer, "two", 2, 50, 0.25)
        seen = list(batches(trainer, 6))
        assert trainer.wait(30) == 0
        status = server.ask("/status")
    by_name: Counter[int] = Counter()
    for batch in seen:
        assert sum(size for _, size, _ in batch["groups"]) == 16
        assert batch["keys"] == sorted(KEYS)
        by_name.update({size: size for _, size, _ in batch["groups"]})
    assert set(by_name) == {2, 4}
    every = [tuple(each) for batch in seen for each in batch["groups"]]
    assert len(set(every)) == len(every)
    assert status["current_step"] == 5


def test_a_kill_of_the_service_loses_and_doubles_nothing(tmp_path: Path, tokenizer: str, begin: Any):
    with serving(tmp_path / "data") as servers:
        trainer = begin("plain_trainer.py", servers[0].url, 12, 4, 2)
        begin("counting_env.py", servers[0].url, tokenizer, "four", 4, 100)
        seen: list[dict[str, Any]] = []
        for batch in batches(trainer, 12):
            seen.append(batch)
            if len(seen) == 12:
                break
        until(lambda: servers[0].ask("/status")["queue_size"] > 0)
        servers[0].kill()
        servers.append(Serving(tmp_path / "data", servers[0].port))
        status = servers[1].ask("/status")
        assert status["current_step"] == 11
        assert status["queue_size"] > 0
        # Theirs gives up after three tries; where this machine is slow it is started again, and may join at once.
        begin("counting_env.py", servers[1].url, tokenizer, "two", 2, 100, 0.5)
        until(lambda: servers[1].ask("/status-env?env_id=1")["self_queue_size"] > 0)
    every = [tuple(each) for batch in seen for each in batch["groups"]]
    assert len(set(every)) == len(every) == 24
