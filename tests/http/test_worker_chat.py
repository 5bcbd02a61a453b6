"""A conversation with tools and a judge in a worker process: equal to one in this process, without the key."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.env.load import load_environment
from tandem.errors import EpisodeFailed
from tandem.rollout.episode import Setting, play
from tandem.rollout.judge import EngineJudge, HttpJudge
from tandem.rollout.workers.forkserver_client import Order
from tandem.rollout.workers.pool import WorkerEnvironment
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Sampling, Span, Task, Trajectory

RENDERER = Renderer(byte_tokenizer())
CODE = '''
import os

from tandem.env.tools import Tools
from tandem.types import Outcome, Task


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Sums:
    tools = Tools(add)

    def tasks(self, split):
        return [Task(f"{split}-1", ({"role": "user", "content": "1+2?"},), {"answer": "3"})]

    async def run(self, task, chat):
        chat.offer(self.tools.schemas)
        reply = await self.tools.play(chat)
        verdict = await chat.judge([{"role": "user", "content": f"Is {reply.text} right?"}], max_tokens=5)
        keys = [value for value in os.environ.values() if "s3cret" in value]
        return Outcome(float(verdict == "yes"), {"keys": len(keys)})
'''


class Scripted:
    version = 0

    def __init__(self, *turns: str) -> None:
        self._turns = [RENDERER.encode(turn) for turn in turns]
        self.asked: list[Sampling] = []

    async def generate(self, prompt_ids, sampling, *, session=None, on_token=None) -> Completion:
        self.asked.append(sampling)
        ids = self._turns[len(self.asked) - 1]
        return Completion(ids, [-1.0] * len(ids), [Span(0, len(ids))], "stop")


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|end|>'


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.failures: list[int] = []
        self.content: Any = "yes"
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Answers(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.headers.get("authorization", ""), body))
        status = self.server.failures.pop(0) if self.server.failures else 200
        answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": self.server.content}}]}).encode()
        self.send_response(status)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


def played(environment: Any, judge: Any, engine: Any) -> Trajectory:
    setting = Setting(environment, engine, RENDERER, Sampling(), 4096, 5.0, 5.0, judge=judge)
    task: Task = environment.tasks("train")[0]

    async def scenario() -> Trajectory:
        try:
            return await play(setting, task, RENDERER.prompt(task.messages), 0)
        finally:
            if isinstance(environment, WorkerEnvironment):
                environment.close()
                await asyncio.sleep(0)

    return asyncio.run(scenario())


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "sums.py").write_text(CODE)
    return str(tmp_path / "sums.py")


def test_tools_and_a_judge_work_in_a_worker_as_here_and_the_key_stays_here(code: str, server: Server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    judge = HttpJudge(server.url, "big", "s3cret", timeout_s=5.0)
    here = played(load_environment(code), judge, Scripted(CALL, "3<|end|>"))
    there = played(WorkerEnvironment(Order(code), 1), judge, Scripted(CALL, "3<|end|>"))
    assert here.reward == there.reward == 1.0
    assert (here.metrics.pop("keys"), there.metrics.pop("keys")) == (1.0, 0.0)
    assert there == here
    assert there.metrics == {"tool_calls": 1.0, "unreadable_tool_calls": 0.0}
    assert "<|tool|>3<|end|>" in RENDERER.decode(there.ids, skip_special=False)
    assert server.asked[0] == server.asked[1] == (
        "Bearer s3cret",
        {"model": "big", "messages": [{"role": "user", "content": "Is 3 right?"}], "max_tokens": 5, "temperature": 0.0},
    )  # fmt: skip


def test_the_runs_own_engine_can_be_the_judge(code: str):
    engine = Scripted(CALL, "3<|end|>", "yes<|end|>")
    judge = EngineJudge(engine, RENDERER, max_context=4096, timeout_s=5.0)
    assert played(load_environment(code), judge, engine).reward == 1.0
    assert (engine.asked[-1].temperature, engine.asked[-1].max_tokens) == (0.0, 5)


def ask(judge: Any) -> str:
    return asyncio.run(judge.ask([{"role": "user", "content": "?"}], max_tokens=9))


def test_a_judge_that_is_busy_is_asked_again(server: Server):
    server.failures = [429, 503]
    assert ask(HttpJudge(server.url, "big", "", timeout_s=5.0)) == "yes"
    assert len(server.asked) == 3


def test_a_question_reads_no_certificates(server: Server, monkeypatch: pytest.MonkeyPatch):
    """That takes 30 ms and more, in which no other episode goes on."""
    judge = HttpJudge(server.url, "big", "", timeout_s=5.0)
    monkeypatch.setattr(ssl, "create_default_context", lambda *_, **__: pytest.fail("read again"))
    assert ask(judge) == "yes"


@pytest.mark.parametrize(
    ("failures", "content", "said"),
    [([401], "yes", "answered 401"), ([503] * 9, "yes", "answered 503"), ([], None, ""), ([], {"a": 1}, "")],
)
def test_a_judge_that_does_not_answer_fails_the_episode_by_its_kind(server: Server, failures, content, said):
    server.failures, server.content = failures, content
    judge = HttpJudge(server.url, "big", "", timeout_s=5.0)
    if not said:
        assert ask(judge) == ""  # it answered, with nothing to read
        return
    with pytest.raises(EpisodeFailed, match=said) as error:
        ask(judge)
    assert error.value.kind == "judge"


def test_a_judge_that_hangs_or_is_not_there_has_a_deadline():
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(EpisodeFailed, match="no answer within"):
            ask(HttpJudge(url, "big", "", timeout_s=0.2))
    with pytest.raises(EpisodeFailed, match=r"ConnectError|no answer within"):
        ask(HttpJudge(url, "big", "", timeout_s=0.5))


def test_an_environment_that_asks_without_a_judge_is_told_so_in_both_places(code: str):
    for environment in (load_environment(code), WorkerEnvironment(Order(code), 1)):
        with pytest.raises(EpisodeFailed, match=r"\[environment.judge\]") as error:
            played(environment, None, Scripted(CALL, "3<|end|>"))
        assert error.value.kind == "judge"
