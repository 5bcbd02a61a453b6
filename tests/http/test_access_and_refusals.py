"""Who may call the OpenAI routes, with which bodies, and what a refusal looks like."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from served import MODEL, Served

HI = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ROUTES = [("GET", "/metrics"), ("GET", "/limits"), ("GET", "/v1/models"), ("GET", "/v1/models/x"), ("POST", CHAT),
          ("POST", TEXT), ("DELETE", "/v1/models"), ("GET", "/nowhere")]  # fmt: skip


def refusal(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    openai = {"type", "param"} if answer.request.url.path.startswith("/v1/") else set[str]()
    assert {"code", "message"} | openai <= set(error) <= {"code", "message", "field"} | openai
    assert error["message"]
    return answer.status_code, error["code"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_answers_a_stranger(scripted: Served, method: str, path: str) -> None:
    with httpx.Client(base_url=scripted.url) as client:
        for credential in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": scripted.token}):
            assert refusal(client.request(method, path, headers=credential)) == (401, "unauthorized")
    with scripted.http() as client:
        assert refusal(client.request(method, path, headers={"Host": "evil.example"})) == (421, "misdirected")
        for origin in ("https://evil.example", "null", "http://localhost:1"):
            assert refusal(client.request(method, path, headers={"Origin": origin})) == (403, "forbidden")
        assert refusal(client.request(method, path, headers={"Sec-Fetch-Site": "cross-site"})) == (403, "forbidden")


def test_health_is_open_to_all_but_other_names(scripted: Served) -> None:
    assert httpx.get(f"{scripted.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{scripted.url}/health", headers={"Host": "evil.example"}).status_code == 421


def test_our_own_origin_and_names_come_in(scripted: Served) -> None:
    port = scripted.url.rpartition(":")[2]
    with scripted.http() as client:
        assert client.get("/limits", headers={"Origin": scripted.url}).status_code == 200
        assert client.get("/limits", headers={"Host": f"LOCALHOST:{port}"}).status_code == 200
        answer = client.get("/limits", headers={"Host": "[::1]"})
    assert answer.json()["body_bytes"] == 2**20
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_cap_is_refused_before_it_is_parsed(scripted: Served, declared: bool) -> None:
    body = json.dumps(HI | {"user": "x" * 2**20}).encode()
    content: Any = body if declared else iter([body[:1000], body[1000:]])  # a stream of chunks declares no length
    with scripted.http() as client:
        answer = client.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert refusal(answer) == (413, "too_large")


def test_other_types_and_encodings_are_refused(scripted: Served) -> None:
    body = json.dumps(HI).encode()
    with scripted.http() as client:
        for headers in (
            {}, {"Content-Type": "text/plain"}, {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        ):  # fmt: skip
            assert refusal(client.post(CHAT, content=body, headers=headers)) == (415, "unsupported_type")


def test_unknown_paths_and_methods_answer_in_json(scripted: Served) -> None:
    with scripted.http() as client:
        assert refusal(client.get("/v1/nowhere")) == (404, "not_found")
        assert refusal(client.get(CHAT)) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b'{"temperature": NaN}', b"[" * 100_000, b'"\\ud800"', b"\xff"]
)
def test_what_is_not_a_json_object_is_refused(scripted: Served, body: bytes) -> None:
    with scripted.http() as client:
        answer = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert refusal(answer)[1] in ("invalid", "invalid_json")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"surprise": 1}, "surprise"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"best_of": 2}, "best_of"),
        ({"chat_template_kwargs": {"mood": "good"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-40}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"stop": ""}, "stop.0"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages.0.mood"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(scripted: Served, change: dict[str, Any], field: str) -> None:
    answer = scripted.post(HI | change)
    assert (answer.status_code, answer.json()["error"].get("field")) == (400, field)


@pytest.mark.parametrize("prompt", [[], "", [[]], ["a", [1]], [1, "a"], [True], [1.0], [-1], {"a": 1}, ["x"] * 257])
def test_a_bad_prompt_is_refused(scripted: Served, prompt: Any) -> None:
    answer = scripted.post({"model": MODEL, "prompt": prompt}, path=TEXT)
    assert (answer.status_code, answer.json()["error"].get("field")) == (400, "prompt")


@pytest.mark.parametrize("logprobs", [2, -1, True])
def test_completions_have_no_alternatives_to_list(scripted: Served, logprobs: Any) -> None:
    answer = scripted.post({"model": MODEL, "prompt": "a", "logprobs": logprobs}, path=TEXT)
    assert (answer.status_code, answer.json()["error"].get("field")) == (400, "logprobs")


def test_knobs_set_to_nothing_are_taken(scripted: Served) -> None:
    neutral = {
        "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "tools": [], "tool_choice": "auto",
        "store": False,
        "response_format": {"type": "text"}, "top_logprobs": 0, "user": "me", "stop": None, "seed": None, "best_of": 1,
        "stream_options": None, "metadata": {"a": "b"},
    }  # fmt: skip
    assert scripted.post(HI | neutral).status_code == 200


def test_messages_as_clients_echo_them_are_taken(scripted: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "hi", "name": "me"},
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]
    answer = scripted.post(HI | {"messages": messages, "return_token_ids": True})
    assert answer.status_code == 200
    prompt = scripted.renderer.decode(answer.json()["prompt_token_ids"], skip_special=False)
    assert prompt.startswith("<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>")
    assert '"add"' in prompt


def test_another_model_is_not_found(scripted: Served) -> None:
    answer = scripted.post(HI | {"model": "gpt-4"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (404, "model")


def test_metrics_count_by_route_and_status(scripted: Served) -> None:
    scripted.engine.script = "abc"
    with scripted.http() as client:
        before = numbers(client)
        client.post(CHAT, json=HI | {"max_tokens": 3})
        client.get("/v1/models", headers={"Host": "evil.example"})
        client.get(f"/{'x' * 50}")
        after = numbers(client)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown['tandem_http_requests_total{method="POST",route="/v1/chat/completions",status="200"}'] == 1
    assert grown['tandem_http_requests_total{method="GET",route="none",status="421"}'] == 1
    assert grown['tandem_http_requests_total{method="GET",route="none",status="404"}'] == 1
    assert grown["tandem_sampled_tokens_total"] == 3
    assert (after["tandem_weight_version"], after["tandem_samples_running"]) == (3, 0)


def numbers(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for line in lines if line[0] != "#" for name, value in [line.rsplit(" ", 1)]}
