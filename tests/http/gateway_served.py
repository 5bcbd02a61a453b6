"""Test helpers: a gateway on a real socket, over an engine that logs its prompts and samples."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
from served import MODEL, ScriptedEngine, wait_until

from tandem.recipes.gateway import to_files
from tandem.rollout.sessions.sessions import Bounds
from tandem.rollout.sessions.store import SessionStore
from tandem.serve.gateway import gateway_service
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import create_app
from tandem.text.renderer import Renderer
from tandem.types import Completion, Sampling

CONTEXT = 1024


class Logged:
    """Passes requests on to an engine and keeps what was asked and answered."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.log = engine, list[tuple[list[int], Completion]]()

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        asked = list(prompt_ids)
        completion = await self.engine.generate(prompt_ids, sampling, **options)
        self.log.append((asked, completion))
        return completion

    async def close(self) -> None:
        await self.engine.close()


class Says(ScriptedEngine):
    """One script after another, whatever it is asked; the last one for ever."""

    def __init__(self, renderer: Renderer, *scripts: str) -> None:
        super().__init__(renderer)
        self.scripts = list(scripts)

    async def say(self, sampling: Sampling, on_token: Any) -> Completion:
        self.script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        return await super().say(sampling, on_token)


@dataclass
class Gateway:
    url: str
    token: str
    engine: Logged
    renderer: Renderer
    data_dir: Path
    client: httpx.Client = field(init=False)
    _seeds: Iterator[int] = field(default_factory=lambda: count(1000, 10))

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=30)

    @property
    def trajectories(self) -> Path:
        return self.data_dir / "trajectories"

    @contextmanager
    def openai(self, session: str = "", **options: Any) -> Iterator[openai.OpenAI]:
        base = f"{self.url}/sessions/{session}/v1" if session else f"{self.url}/v1"
        with openai.OpenAI(base_url=base, api_key=self.token, max_retries=0, **options) as client:
            yield client

    def open(self, **body: Any) -> str:
        answer = self.client.post("/sessions", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def chat(self, messages: list[Any], session: str = "", **options: Any) -> dict[str, Any]:
        """A new seed every time, the same in every run: two answers of a random model may be equal."""
        path = f"/sessions/{session}/v1/chat/completions" if session else "/v1/chat/completions"
        answer = self.post(path, {"model": MODEL, "messages": messages, "seed": next(self._seeds)} | options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def say(self, messages: list[Any], session: str = "", **options: Any) -> dict[str, Any]:
        """The message that is answered, as clients keep it."""
        return self.chat(messages, session, **options)["choices"][0]["message"]

    def shown(self, session: str) -> dict[str, Any]:
        answer = self.client.get(f"/sessions/{session}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def reward(self, session: str, reward: float = 1.0, **more: Any) -> dict[str, Any]:
        answer = self.post(f"/sessions/{session}/reward", {"reward": reward} | more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def delivered(self, session: str) -> list[dict[str, Any]]:
        """The group that a session's trajectories left in."""
        wait_until(lambda: self.left_in(session))
        return self.left_in(session)

    def left_in(self, session: str) -> list[dict[str, Any]]:
        """Nothing if they have not left so far."""
        for path in self.trajectories.glob("*.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            if any(row["extra"]["session"] == session for row in rows):
                return rows
        return []

    def check(self, *sessions: str) -> list[list[str]]:
        """Every turn is what the engine saw and sampled, and the engine saw nothing else; then, once rewarded, the
        trajectories say the same. For each session the path of each branch, as the number of its turns."""
        log = [(prompt, each.ids, each.logprobs, each.versions) for prompt, each in self.engine.log]
        paths: list[list[str]] = []
        for session in sessions:
            turns = {turn["id"]: turn for turn in self.shown(session)["turns"]}
            for turn in turns.values():
                versions = [version for version, count in turn["spans"] for _ in range(count)]
                seen = (prompt_of(turn, turns), turn["ids"], turn["logprobs"], versions)
                assert seen in log, f"the engine never saw turn {turn['id']}"
                log.remove(seen)
            branches = [path_of(turns[leaf], turns) for leaf in self.shown(session)["branches"]]
            paths.append(sorted("-".join(str(list(turns).index(turn["id"])) for turn in path) for path in branches))
            self.reward(session)
            rows = [row for row in self.delivered(session) if row["extra"]["session"] == session]
            assert {row["extra"]["branch"] for row in rows} == {path[-1]["id"] for path in branches}
            for row, path in zip(rows, branches, strict=True):
                check_row(row, path, turns)
        assert log == [], "the engine was asked what no turn holds"
        return paths


def path_of(turn: dict[str, Any], turns: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(path_of(turns[turn["parent"]], turns) if turn["parent"] else []), turn]


def prompt_of(turn: dict[str, Any], turns: dict[str, Any]) -> list[int]:
    if turn["parent"] is None:
        return turn["context"]
    parent = turns[turn["parent"]]
    return prompt_of(parent, turns) + parent["ids"][: turn["kept"]] + turn["context"]


def check_row(row: dict[str, Any], path: list[dict[str, Any]], turns: dict[str, Any]) -> None:
    last = path[-1]
    assert row["ids"] == prompt_of(last, turns) + last["ids"]
    sampled = [i for i, trained in enumerate(row["trained"]) if trained]
    kept = [*(turn["kept"] for turn in path[1:]), len(last["ids"])]
    assert [row["ids"][i] for i in sampled] == [
        id for turn, count in zip(path, kept, strict=True) for id in turn["ids"][:count]
    ]
    assert [row["logprobs"][i] for i in sampled] == [
        logprob for turn, count in zip(path, kept, strict=True) for logprob in turn["logprobs"][:count]
    ]
    assert len(row["ids"]) == len(row["trained"]) == len(row["logprobs"]) == sum(count for _, count in row["spans"])
    versions = [version for version, count in row["spans"] for _ in range(count)]
    assert all((version >= 0) == bool(trained) for version, trained in zip(versions, row["trained"], strict=True))


@contextmanager
def gateway_serving(
    engine: Any, renderer: Renderer, data_dir: Path, *, bounds: Bounds | None = None, deliver: Any = None
) -> Iterator[Gateway]:
    listen, logged = Listen(data_dir), Logged(engine)
    (data_dir / "trajectories").mkdir(parents=True, exist_ok=True)

    deliver = deliver or to_files(data_dir / "trajectories")
    service = gateway_service(
        logged, renderer, SessionStore(data_dir / "sessions"), deliver, model_id=MODEL, context=CONTEXT,
        num_ids=len(renderer.tokenizer), bounds=bounds,
    )  # fmt: skip
    app = create_app(service, token=listen.token(), hosts=listen.hosts, body_bytes=2**20)
    server = Server(app, listen, tell=lambda _: None)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.url or not thread.is_alive())
        gateway = Gateway(server.url, listen.token(), logged, renderer, data_dir)
        with gateway.client:
            yield gateway
    finally:
        server.should_exit = True
        thread.join(timeout=15)
        assert not thread.is_alive()
