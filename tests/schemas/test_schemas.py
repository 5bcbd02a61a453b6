"""Requests that schemathesis makes of each service's OpenAPI document, right and wrong ones, over a real connection: no
answer is a 5xx, and each has a status, a type and a body that the document names.

In an environment of its own: `make test-schemas`. TANDEM_EXAMPLES: requests of each route, 300 by default.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("schemathesis", reason="`make test-schemas` makes the environment that has it")

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))
sys.path.insert(0, str(Path(__file__).parents[1] / "control"))

from plane import SPEC, TOKEN, piece, served
from served import ScriptedEngine
from test_openapi import made
from wheels import push_body, wheel

from tandem.io.chat_feedback import ChatStore
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import create_app
from tandem.serve.openai.service import openai_service
from tandem.shapes.agent import weights_of
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer

SERVICES = ("control", "serve", "engine", "gateway", "online", "rollouts", "atropos")
EXAMPLES = int(os.environ.get("TANDEM_EXAMPLES", "300"))
EVENTS = "text/event-stream"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@schemathesis.serializer("application/x-tandem-groups")
def groups(_: Any, value: Any) -> bytes:
    """No document describes this format: what arrives is hardly ever one."""
    return repr(value).encode("utf-8", "replace")


@dataclass
class Answering:
    """A service that listens."""

    url: str
    token: str
    tokens: dict[str, str] = field(default_factory=dict)
    """Of paths that have another."""
    there: dict[str, list[str]] = field(default_factory=dict)
    """What is there, by the part of a path before it."""
    right: dict[str, list[Any]] = field(default_factory=dict)
    """Bodies that a path takes."""

    def headers(self, path: str) -> dict[str, str]:
        token = next((token for start, token in self.tokens.items() if path.startswith(start)), self.token)
        return {"Authorization": f"Bearer {token}", "Accept": "application/json, */*;q=0.5"}


@contextmanager
def listening(app: Any, home: Path) -> Iterator[str]:
    """Serve an app; yield its URL."""
    server = Server(app, Listen(home / "listen"), lambda _: None)
    thread = threading.Thread(target=server.run)
    thread.start()
    by = time.monotonic() + 60
    while not server.url:
        assert time.monotonic() < by, "the service did not begin"
        time.sleep(0.01)
    yield server.url
    server.should_exit = True
    thread.join()


def control(home: Path, ending: ExitStack) -> tuple[Any, Answering]:
    """A control plane that has one of everything, and a replica that answers."""
    plane = served(home)
    plane.made("/api/projects", {"name": "p"})
    key = plane.made("/api/keys", {"name": "k", "scopes": ["runs:read"]})["id"]
    secret = plane.made("/api/secrets", {"name": "HF_TOKEN", "value": "v"})["id"]
    run, other = plane.submit(secrets=["HF_TOKEN"]), plane.submit(name="other")
    attempt, token = plane.open_attempt(run)
    plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)
    sent = {"instance": "i", "pieces": [piece("log.txt", 1, 0, b"step 1\n")]}
    plane.made(f"/api/attempts/{attempt}/append", sent, token)
    shout, name = wheel(), "default-shout"
    plane.made("/api/packages", push_body(shout))
    for deployment in ("kept", "taken"):
        plane.made("/api/deployments", {"name": deployment, "run": run, "step": 1})
    renderer = Renderer(byte_tokenizer())
    serving, its_token = plane.open_attempt(plane.replica_runs()[0])
    plane.made(f"/api/attempts/{serving}/claim", {"instance": "i"}, its_token)
    store, sizes = ChatStore(home / "replica"), {"context": 256, "num_ids": 300}
    service = openai_service(ScriptedEngine(renderer), renderer, model_id="kept@1", chats=store, **sizes)
    app = create_app(service, token=plane.plane.callers.serve_token(serving), hosts=frozenset({"127.0.0.1"}))
    url = ending.enter_context(listening(app, home / "replica"))
    alive = {"instance": "i", "serving": url, "served": {weights_of("kept@1", run, 1): ""}}
    plane.made(f"/api/attempts/{serving}/append", alive, its_token)
    files = [shout[0], f"{shout[0]}.metadata", f"{shout[0]}.provenance"]
    there = {
        "runs": [run, other], "keys": [key], "secrets": [secret], "attempts": [attempt], "files": ["log.txt"],
        "packages": [name], "simple": [name], "{id}": files, "{name}": files, "deployments": ["kept", "taken"],
    }  # fmt: skip
    of_replica = {"Authorization": f"Bearer {plane.plane.callers.serve_token(serving)}"}
    asked = [{"model": model, "max_tokens": 4} for model in ("kept", "kept@1")]
    chats = [{**each, "messages": [{"role": "user", "content": "hi"}]} for each in asked]
    chat = httpx.post(f"{url}/v1/chat/completions", json={**chats[0], "model": "kept@1"}, headers=of_replica).json()
    deploy = {"name": "taken", "run": run, "step": 2, "canary": 0.5}
    submitted = {"spec_toml": SPEC, "target": "box"}
    right = {
        "/api/runs": [submitted], "/api/plans": [submitted],
        "/api/packages": [push_body(shout), push_body(wheel(version="2.0")), push_body(wheel("default-other"))],
        "/api/packages/{id}/yank": [{"version": "1.0"}, {"version": "1.0", "undo": True}],
        "/api/deployments": [deploy, {"name": "n", "run": run, "step": 1}],
        "/api/deployments/{id}/promote": [{"revision": 1}, {"revision": 2}],
        "/v1/chat/completions": [*chats, {**chats[0], "stream": True}],
        "/v1/completions": [{**each, "prompt": "hi"} for each in asked],
        "/v1/responses": [{"model": each["model"], "input": "hi"} for each in asked],
        "/v1/feedback": [{"id": chat["id"], "value": 1.0}, {"id": "chatcmpl-x.kept@1", "value": 1.0}],
    }  # fmt: skip
    return plane.app, Answering("", TOKEN, {"/api/attempts/": token}, there, right)


@pytest.fixture(scope="module", params=SERVICES)
def answering(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answering]:
    home = tmp_path_factory.mktemp(request.param)
    ending = ExitStack()
    if request.param == "control":
        app, found = control(home, ending)
    else:
        service = made(request.param, home)
        if request.param == "online":  # its beginning loads a trainer, which this service does not have
            service = replace(service, start=None)
        app = create_app(service, token="t", hosts=frozenset({"127.0.0.1"}))
        found = Answering("", "t")
    with ending:
        found.url = ending.enter_context(listening(app, home))
        yield found


def has_an_end(operation: dict[str, Any]) -> bool:
    contents = [set(answer.get("content", {})) for status, answer in operation["responses"].items() if status < "300"]
    return contents != [{EVENTS}]


def test_no_request_gets_a_5xx_or_what_the_document_does_not_name(answering: Answering) -> None:
    document = httpx.get(f"{answering.url}/openapi.json", headers=answering.headers("/openapi.json")).json()
    schema = schemathesis.openapi.from_dict(document)
    wrong: dict[str, str] = {}
    got: dict[str, Counter[int]] = {}
    with requests.Session() as session:
        operations = [found.ok() for found in schema.get_all_operations()]
        for operation in sorted(
            operations, key=lambda each: each.path.endswith("/undeploy")
        ):  # last: it ends what answers
            if not has_an_end(document["paths"][operation.path][operation.method.lower()]):
                continue
            counted = got.setdefault(operation.label, Counter())
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                try:
                    ask(answering, session, operation, mode, counted)
                except BaseExceptionGroup as errors:
                    wrong[f"{operation.label} {mode}"] = "; ".join(str(error) for error in errors.exceptions)[:1500]
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - a skip of hypothesis, too
                    if "nsatisfiable" in type(error).__name__ or "Skip" in type(error).__name__:
                        continue  # nothing about this route can be wrong
                    wrong[f"{operation.label} {mode}"] = f"{type(error).__name__}: {error}"[:1500]
    for label, statuses in got.items():
        print(f"{statuses.total():5} {label:55}", " ".join(f"{at}:{times}" for at, times in sorted(statuses.items())))
    assert len(got) > 6
    assert wrong == {}, "\n\n".join(f"{name}\n{said}" for name, said in wrong.items())
    if EXAMPLES >= 300:  # by fewer, chance may not come to the right body with the right id
        assert [path for path in answering.right if not any(status < 300 for status in got[f"POST {path}"])] == [], got


def ask(
    answering: Answering, session: requests.Session, operation: Any, mode: GenerationMode, counted: Counter[int]
) -> None:
    parts = operation.path.split("/")
    known = {
        part.strip("{}"): answering.there.get(before, []) for before, part in pairwise(parts) if part.startswith("{")
    }
    right = answering.right.get(operation.path, []) if mode is GenerationMode.POSITIVE else []

    @settings(
        max_examples=EXAMPLES // 2, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def one(case: Any, data: st.DataObject) -> None:
        for name in case.path_parameters or {}:
            if chosen := data.draw(st.sampled_from(["", *known.get(name, ()), *known.get(name, ())])):
                case.path_parameters[name] = chosen
        body = data.draw(st.sampled_from([None, *right]))
        if body is not None:
            case.body = body
        headers = answering.headers(operation.path)
        if "Idempotency-Key" in (case.headers or {}) and answering.right and data.draw(st.booleans()):
            headers["Idempotency-Key"] = uuid.uuid4().hex
        answer = case.call(base_url=answering.url, session=session, headers=headers, timeout=30)
        counted[answer.status_code] += 1
        unfit = operation.path == "/health"  # its 503 says that the service cannot answer
        case.validate_response(answer, checks=CHECKS[1:] if unfit else CHECKS)

    one()
