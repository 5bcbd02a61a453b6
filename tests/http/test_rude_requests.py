"""Requests that would keep a server busy: refused before any work, or done where they hold up no other. What is counted
is text that reached the tokenizer, and the thread that read it; benchmarks/rude_requests.py measures the times."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_served import FakeEngine, engine_serving
from gateway_served import Says, gateway_serving
from rollouts_served import serving_rollouts
from served import MODEL, ScriptedEngine, serving, wait_until

from tandem.serve.http import off_loop as beside
from tandem.serve.http import request_bounds
from tandem.serve.openai import requests
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer

CHAT = "/v1/chat/completions"
LONG = 900_000


class Watched:
    """A tokenizer that tells how many characters it was given, and in which threads."""

    def __init__(self) -> None:
        self._tokenizer, self.num_chars = byte_tokenizer(), 0
        self.threads, self.rendered_in = set[str](), set[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.num_chars += len(text)
        self.threads.add(threading.current_thread().name)
        return self._tokenizer.encode(text, **options)

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        self.rendered_in.add(threading.current_thread().name)
        return self._tokenizer.apply_chat_template(*args, **options)

    def forget(self) -> None:
        self.num_chars, self.threads, self.rendered_in = 0, set(), set()


@pytest.fixture(scope="module")
def tokenizer() -> Watched:
    return Watched()


@pytest.fixture(scope="module")
def servers(tokenizer: Watched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.Client]]:
    renderer, directory = Renderer(tokenizer), tmp_path_factory.mktemp("rude")
    with (
        serving(ScriptedEngine(renderer), renderer, directory / "serve") as served,
        gateway_serving(Says(renderer, "ok"), renderer, directory / "gateway") as gateway,
        engine_serving(FakeEngine(), renderer, directory / "engine") as engine,
        served.http() as client,
    ):
        yield {"serve": client, "gateway": gateway.client, "engine": engine.client}


def said(content: str, count: int = 1) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}] * count, "max_tokens": 4}


TOO_LONG: list[tuple[str, dict[str, Any]]] = [
    (CHAT, said("a" * LONG)),
    (CHAT, said("hello " * 1000, 150)),
    ("/v1/completions", {"model": MODEL, "prompt": ["a" * LONG, "b"]}),
    ("/v1/completions", {"model": MODEL, "prompt": " " * LONG}),
]


@pytest.mark.parametrize("server", ["serve", "gateway", "engine"])
@pytest.mark.parametrize(("path", "body"), TOO_LONG)
def test_a_text_that_cannot_fit_never_reaches_the_tokenizer(
    servers: dict[str, httpx.Client], tokenizer: Watched, server: str, path: str, body: dict[str, Any]
) -> None:
    tokenizer.forget()
    answer = servers[server].post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded"), answer.text
    assert tokenizer.num_chars == 0


def test_a_gateway_s_own_route_refuses_it_too(servers: dict[str, httpx.Client], tokenizer: Watched) -> None:
    tokenizer.forget()
    answer = servers["gateway"].post("/generate", json={"text": ["a" * LONG], "sampling_params": {}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "context_length_exceeded")
    assert tokenizer.num_chars == 0


def test_the_first_of_many_prompts_that_is_too_long_is_the_last_that_is_read(
    servers: dict[str, httpx.Client], tokenizer: Watched
) -> None:
    tokenizer.forget()
    answer = servers["serve"].post("/v1/completions", json={"model": MODEL, "prompt": ["x" * 3000] * 256})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "prompt")
    assert tokenizer.num_chars == 3000
    assert tokenizer.threads == {"aside"}, "256 small prompts are one large request"


def test_templates_are_never_rendered_on_the_event_loop(servers: dict[str, httpx.Client], tokenizer: Watched) -> None:
    for client in servers.values():
        tokenizer.forget()
        assert client.post(CHAT, json=said("hi")).status_code == 200
        assert tokenizer.rendered_in == {"aside"}


@pytest.mark.parametrize("server", ["serve", "gateway", "engine"])
def test_a_large_body_is_parsed_beside_the_event_loop_and_one_of_too_many_values_never(
    servers: dict[str, httpx.Client], server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def watched(raw: bytes, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return json.loads(raw)

    monkeypatch.setattr(requests, "from_json", watched)
    assert servers[server].post(CHAT, json=said("hi") | {"user": "u" * request_bounds.AT_ONCE_BYTES}).status_code == 200
    assert threads == ["aside"]
    monkeypatch.setattr(request_bounds, "MAX_VALUES", 20_000)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": [[]] * 25_000}}}
    answer = servers[server].post(CHAT, json=said("hi") | {"tools": [tool]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert threads == ["aside"]


def test_messages_tools_and_the_arguments_of_calls_have_bounds(
    servers: dict[str, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_bounds, "MAX_VALUES", 50_000)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": "y" * 2**18}}}
    call = {"function": {"name": "f", "arguments": json.dumps({"x": [[]] * 60_000})}}
    deep = {"type": "function", "function": {"name": "f", "parameters": {"x": []}}}
    body = json.dumps(said("hi") | {"tools": [deep]}).replace("[]", "[" * 10_000 + "]" * 10_000)
    for asked, field in (
        (said("hi", request_bounds.MAX_MESSAGES + 1), "messages"),
        (said("hi") | {"tools": [tool]}, "tools"),
        (said("hi") | {"messages": [{"role": "assistant", "tool_calls": [call]}]}, "messages"),
        (json.loads(json.dumps(said("hi"))) | {"tools": [deep]}, None),
    ):
        content = json.dumps(asked) if field else body
        answer = servers["serve"].post(CHAT, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 413), answer.text
        assert answer.json()["error"].get("field") == field


def test_a_rollout_service_counts_before_it_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bounds, "MAX_VALUES", 50_000)
    lists = {"x": [[]] * 60_000}
    with serving_rollouts(tmp_path) as client:
        for path, body in (
            ("/v2/trainer", {"run_id": "r", "extra": lists}),
            ("/v2/groups", {"groups": [{"trajectories": [], "extra": lists}]}),
        ):
            assert client.send(path, body).status_code == 413, path
        client.begin(extra={"x": ["y" * 2**17]})  # large, and in order: as anywhere


LOOPS = """{%- for message in messages -%}{%- if 'loop' in message.content -%}
{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- endif -%}<|user|>{{ message.content }}<|end|>{%- endfor -%}"""


def test_a_template_that_loops_is_ended_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "DEADLINE_S", 1.0)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = LOOPS
    renderer = Renderer(tokenizer)
    with serving(ScriptedEngine(renderer), renderer, tmp_path) as served, served.http() as client:
        asking = threading.Thread(target=lambda: answers.append(served.post(said("loop"))))
        answers: list[httpx.Response] = []
        asking.start()
        healthy = 0
        while not answers:
            assert client.get("/health").status_code == 200
            healthy += 1
        asking.join()
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (400, "too_slow")
        assert healthy > 1
        wait_until(lambda: not any(thread.name == "aside" for thread in threading.enumerate()))
        assert served.post(said("hi")).status_code == 200
