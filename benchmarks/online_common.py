"""An online server as a process, and a client that waits for what it asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

ENDED = ("published", "rejected", "failed", "cancelled")


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The data of each server-sent event, up to the mark of the end."""
    rest = ""
    for piece in answer.iter_text():
        *lines, rest = (rest + piece).split("\n")
        yield from (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


class Asking(threading.Thread):
    """One question after the other, until `ended` is set or one fails: `error` says how."""

    def __init__(self, client: httpx.Client, number: int) -> None:
        super().__init__(daemon=True)
        self.client, self.number, self.ended, self.error = client, number, threading.Event(), ""

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                self.ask()
        except (httpx.HTTPError, KeyError, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def ask(self) -> None:
        raise NotImplementedError


class OnlineServer:
    """`text`: the spec. Started again in the same directory, it goes on."""

    def __init__(self, home: Path, text: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.data_dir, self.spec = home / "data", home / "online.toml"
        self.spec.write_text(text)
        self.command = [sys.executable, "-m", "tandem", "online", "serve", str(self.spec), "--port", "0"]
        self.command += ["--data-dir", str(self.data_dir), "--ready-file", str(self.data_dir / "ready.json")]
        self.process: subprocess.Popen[bytes] | None = None
        self.client: httpx.Client | None = None

    def start(self, deadline_s: float = 120.0) -> OnlineServer:
        ready = self.data_dir / "ready.json"
        ready.unlink(missing_ok=True)
        with (self.spec.parent / "server.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT)
        until = time.monotonic() + deadline_s
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"the server did not start: {self.log()}")
            time.sleep(0.02)
        said = json.loads(ready.read_text())
        self.client = self.connect(Path(said["token_file"]).read_text(), said["url"])
        return self

    def connect(self, token: str, url: str = "") -> httpx.Client:
        url = url or str(self.http.base_url)
        return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=120)

    @property
    def http(self) -> httpx.Client:
        assert self.client is not None
        return self.client

    def log(self) -> str:
        files = [self.spec.parent / "server.log", self.data_dir / "trainer.log"]
        return "\n".join(file.read_text()[-3000:] for file in files if file.exists())

    def get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def post(self, path: str, body: Any = None, key: str = "") -> Any:
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        answer = self.http.post(path, json={} if body is None else body, headers=headers)
        if answer.is_error:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
        return answer.json()

    def teach(self, samples: Sequence[Any], key: str = "", **options: Any) -> str:
        return self.post("/train", {"samples": list(samples), **options}, key)["id"]

    def wait(self, job: str, deadline_s: float = 120.0) -> dict[str, Any]:
        until = time.monotonic() + deadline_s
        while (row := self.get(f"/train/jobs/{job}"))["state"] not in ENDED:
            if time.monotonic() > until:
                raise RuntimeError(f"job {job} is {row['state']} after {deadline_s:g} s: {self.log()}")
            time.sleep(0.02)
        return row

    def ask(self, text: str, max_tokens: int = 16, **options: Any) -> dict[str, Any]:
        body = {"model": self.get("/v1/models")["data"][0]["id"], "messages": [{"role": "user", "content": text}]}
        body |= {"max_tokens": max_tokens, "temperature": 0.0, **options}
        return self.http.post("/v1/chat/completions", json=body).raise_for_status().json()

    def stop(self, deadline_s: float = 15.0) -> int:
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(deadline_s)
        self._forget()
        return code

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._forget()

    def kill_trainer(self) -> None:
        if pid := self.get("/train/status")["trainer"]["pid"]:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)

    def _forget(self) -> None:
        if self.client is not None:
            self.client.close()
        self.process = self.client = None


@contextmanager
def online_server(home: Path, text: str) -> Iterator[OnlineServer]:
    server = OnlineServer(home, text)
    try:
        yield server.start()
    finally:
        server.kill()


WORDS = [
    *("apple", "river", "stone", "cloud", "tiger", "maple", "ocean", "lemon", "eagle", "piano"),
    *("candle", "rocket", "silver", "garden", "winter", "bridge", "copper", "violet", "meadow", "harbor"),
]


def fact(number: int) -> dict[str, Any]:
    """A question that no model knows the answer to."""
    word, again = WORDS[number % len(WORDS)], number // len(WORDS)
    question, answer = f"{word}{f' {again}' if again else ''}?", f"{number * 37 % 100:02d}"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
