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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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

from plane import TOKEN, piece, served
from test_openapi import made

from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import create_app

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
    ids: dict[str, list[str]] = field(default_factory=dict)
    """What is there, by the first part of a path after /api."""

    def headers(self, path: str) -> dict[str, str]:
        token = next((token for start, token in self.tokens.items() if path.startswith(start)), self.token)
        return {"Authorization": f"Bearer {token}", "Accept": "application/json, */*;q=0.5"}


def control(home: Path) -> tuple[Any, Answering]:
    """A control plane that has one of everything."""
    plane = served(home)
    plane.made("/api/projects", {"name": "p"})
    key = plane.made("/api/keys", {"name": "k", "scopes": ["runs:read"]})["id"]
    secret = plane.made("/api/secrets", {"name": "HF_TOKEN", "value": "v"})["id"]
    run, other = plane.submit(secrets=["HF_TOKEN"]), plane.submit(name="other")
    attempt, token = plane.open_attempt(run)
    plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)
    sent = {"instance": "i", "pieces": [piece("log.txt", 1, 0, b"step 1\n")]}
    plane.made(f"/api/attempts/{attempt}/append", sent, token)
    ids = {"runs": [run, other], "keys": [key], "secrets": [secret], "attempts": [attempt]}
    return plane.app, Answering("", TOKEN, {"/api/attempts/": token}, ids)


@pytest.fixture(scope="module", params=SERVICES)
def answering(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answering]:
    home = tmp_path_factory.mktemp(request.param)
    if request.param == "control":
        app, found = control(home)
    else:
        service = made(request.param, home)
        if request.param == "online":  # its beginning loads a trainer, which this service does not have
            service = replace(service, start=None)
        app = create_app(service, token="t", hosts=frozenset({"127.0.0.1"}))
        found = Answering("", "t")
    server = Server(app, Listen(home / "listen"), lambda _: None)
    thread = threading.Thread(target=server.run)
    thread.start()
    by = time.monotonic() + 60
    while not server.url:
        assert time.monotonic() < by, "the service did not begin"
        time.sleep(0.01)
    found.url = server.url
    yield found
    server.should_exit = True
    thread.join()


def has_an_end(operation: dict[str, Any]) -> bool:
    contents = [set(answer.get("content", {})) for status, answer in operation["responses"].items() if status < "300"]
    return contents != [{EVENTS}]


def test_no_request_gets_a_5xx_or_what_the_document_does_not_name(answering: Answering) -> None:
    document = httpx.get(f"{answering.url}/openapi.json", headers=answering.headers("/openapi.json")).json()
    schema = schemathesis.openapi.from_dict(document)
    wrong: dict[str, str] = {}
    num_operations = 0
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            if not has_an_end(document["paths"][operation.path][operation.method.lower()]):
                continue
            num_operations += 1
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                try:
                    ask(answering, session, operation, mode)
                except BaseExceptionGroup as errors:
                    wrong[f"{operation.label} {mode}"] = "; ".join(str(error) for error in errors.exceptions)[:1500]
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - a skip of hypothesis, too
                    if "nsatisfiable" in type(error).__name__ or "Skip" in type(error).__name__:
                        continue  # nothing about this route can be wrong
                    wrong[f"{operation.label} {mode}"] = f"{type(error).__name__}: {error}"[:1500]
    assert num_operations > 6
    assert wrong == {}, "\n\n".join(f"{name}\n{said}" for name, said in wrong.items())


def ask(answering: Answering, session: requests.Session, operation: Any, mode: GenerationMode) -> None:
    parts = operation.path.split("/")
    known = answering.ids.get(parts[2] if len(parts) > 2 else "", [])

    @settings(
        max_examples=EXAMPLES // 2, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode), chosen=st.sampled_from(["", *known, *known]))
    def one(case: Any, chosen: str) -> None:
        if chosen and "id" in (case.path_parameters or {}):
            case.path_parameters["id"] = chosen
        headers = answering.headers(operation.path)
        if "Idempotency-Key" in (case.headers or {}) and chosen != "":
            headers["Idempotency-Key"] = uuid.uuid4().hex
        answer = case.call(base_url=answering.url, session=session, headers=headers, timeout=30)
        unfit = operation.path == "/health"  # its 503 says that the service cannot answer
        case.validate_response(answer, checks=CHECKS[1:] if unfit else CHECKS)

    one()
