"""Each service publishes what it takes and answers, and the document is of the routes that it has."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_served import FakeEnd, FakeEngine
from fastapi import FastAPI
from fastapi.openapi.models import OpenAPI
from fastapi.routing import iter_route_contexts
from gateway_served import Says
from served import MODEL, ScriptedEngine

from tandem.build import online
from tandem.online.job_store import JobStore
from tandem.online.orchestrator import Orchestrator
from tandem.online.sample_replay import ReplayMemory
from tandem.recipes.gateway import to_files
from tandem.recipes.rollout_service import with_atropos
from tandem.rollout.atropos.service import Atropos
from tandem.rollout.queue.queue import RolloutQueue
from tandem.rollout.sessions.store import SessionStore
from tandem.serve.engine.service import engine_service
from tandem.serve.gateway import gateway_service
from tandem.serve.http.service import HotRoute, Service, create_app
from tandem.serve.online.past_versions import PastVersions
from tandem.serve.online.service import online_service
from tandem.serve.openai.service import openai_service
from tandem.serve.rollouts.service import rollouts_service
from tandem.spec.online import parse_online_spec
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer

SERVICES = ("serve", "engine", "gateway", "online", "rollouts", "atropos")
FEEDBACK = b'{"metric": "m", "version": 0, "value": 1.0}'  # its body is read before its key
WITHOUT_BODY = {"/v2/environments/{id}/alive"}
SIZES: dict[str, Any] = {"model_id": MODEL, "context": 256, "num_ids": 300}
HEADERS = {"Host": "localhost", "Authorization": "Bearer t", "Content-Type": "application/json"}


def made(name: str, home: Path) -> Service:
    renderer = Renderer(byte_tokenizer())
    if name == "serve":
        return openai_service(ScriptedEngine(renderer), renderer, **SIZES)
    if name == "engine":
        return engine_service(FakeEngine(), FakeEnd, renderer=renderer, **SIZES)
    if name == "gateway":
        return gateway_service(Says(renderer, "ok"), renderer, SessionStore(home), to_files(home), **SIZES)
    if name == "rollouts":
        return rollouts_service(RolloutQueue(home))
    if name == "atropos":
        queue = RolloutQueue(home)
        return with_atropos(rollouts_service(queue, greets=False), Atropos(queue, home), open_to_all=True)
    spec = parse_online_spec({"model": {"preset": "tiny"}})
    alone, store = online.alone(spec, home), JobStore(home / "jobs")
    memory = ReplayMemory(spec.replay, spec.seed, store, spec.train.batch_size)

    def no_trainer() -> Any:
        raise AssertionError("nothing is trained here")

    def no_source(link: Any) -> Any:
        raise AssertionError("nothing is loaded here")

    ordinary = online.ordinary(spec, alone, home)
    conductor = Orchestrator(spec, store, alone.engine, no_source, no_trainer, home / "versions", memory, ordinary)
    return online_service(conductor, alone.renderer, SessionStore(home / "sessions"), PastVersions(None), **SIZES)


@pytest.fixture(params=SERVICES)
def app(request: Any, tmp_path: Path) -> Iterator[FastAPI]:
    service = made(request.param, tmp_path)
    yield create_app(service, token="t", hosts=frozenset({"localhost"}))
    if service.close is not None:
        asyncio.run(asyncio.wait_for(service.close(), 10))  # pyright: ignore[reportArgumentType]


def ask(app: FastAPI, method: str, path: str, content: bytes = b"", **headers: str) -> httpx.Response:
    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(one())


def operations(app: FastAPI) -> set[tuple[str, str]]:
    found = [context.original_route if isinstance(context.original_route, HotRoute) else context
             for context in iter_route_contexts(app.routes)]  # fmt: skip
    return {(method, each.path) for each in found for method in each.methods - {"HEAD"}}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (each for key, each in value.items() if key == "$ref")
        yield from (found for each in value.values() for found in references(each))
    elif isinstance(value, list):
        yield from (found for each in value for found in references(each))


def test_the_document_has_every_route_with_its_body_its_answers_and_its_errors(app: FastAPI) -> None:
    document = ask(app, "GET", "/openapi.json", **HEADERS).json()
    OpenAPI.model_validate(document)
    assert ask(app, "GET", "/openapi.json", **HEADERS).json() == document
    told = {(method.upper(), path) for path, each in document["paths"].items() for method in each}
    assert {(method, re.sub(r":\w+}", "}", path)) for method, path in operations(app)} == told
    assert len(told) > 6
    schemas = document["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in references(document)} <= schemas.keys()
    for path, each in document["paths"].items():
        for method, operation in each.items():
            named = {parameter["name"] for parameter in operation.get("parameters", []) if parameter["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path)), path
            assert ("requestBody" in operation) == (method == "post" and path not in WITHOUT_BODY), path
            assert len([status for status in operation["responses"] if status < "300"]) == 1
            error = "OpenAiError" if "/v1/" in path else "Error"
            for status, response in operation["responses"].items():
                if status >= "400":
                    assert response["content"]["application/json"]["schema"]["$ref"].endswith(f"/{error}")


def test_what_goes_wrong_is_told_of_in_the_document(app: FastAPI) -> None:
    document = ask(app, "GET", "/openapi.json", **HEADERS).json()
    for path, each in document["paths"].items():
        for method, operation in each.items():
            known, filled = operation["responses"].keys(), re.sub(r"{\w+}", "1", path)
            stranger = ask(app, method.upper(), filled, **HEADERS | {"Authorization": ""}).status_code
            assert str(stranger) in known or stranger < 300, (method, path, stranger)
            assert (stranger == 401) == (operation.get("security") != []), (method, path)
            if "text/event-stream" in operation["responses"].get("200", {}).get("content", {}) and method == "get":
                continue  # it has no end
            for body in (b"[1]", b"{", b'{"surprise": 1}') if method == "post" else (b"",):
                answer = ask(app, method.upper(), filled, body, **HEADERS, **{"Idempotency-Key": f"{path}{body}"[:20]})
                assert str(answer.status_code) in known, (method, path, body, answer.text)
                assert answer.status_code != 500, (method, path, body)


def test_the_writes_that_need_a_key_say_so(app: FastAPI) -> None:
    document = ask(app, "GET", "/openapi.json", **HEADERS).json()
    for path, each in document["paths"].items():
        for method, operation in each.items():
            known = [one for one in operation.get("parameters", []) if one["name"] == "Idempotency-Key"]
            if method == "post":
                body = FEEDBACK if path == "/feedback" else b"{}"
                answer = ask(app, "POST", re.sub(r"{\w+}", "1", path), body, **HEADERS)
                asked = answer.json().get("error", {}).get("field") == "idempotency-key" if answer.content else False
                assert asked == any(one["required"] for one in known), path


def test_a_body_of_the_document_is_one_that_is_taken(tmp_path: Path) -> None:
    app = create_app(made("serve", tmp_path), token="t", hosts=frozenset({"localhost"}))
    document = ask(app, "GET", "/openapi.json", **HEADERS).json()
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][chat["$ref"].rpartition("/")[2]]
    assert {"model", "messages"} <= set(schema["required"])
    assert {"n", "max_tokens", "tools", "stream", "top_k"} <= schema["properties"].keys()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = ask(app, "POST", "/v1/chat/completions", json.dumps(body).encode(), **HEADERS)
    assert answer.status_code == 200, answer.text
