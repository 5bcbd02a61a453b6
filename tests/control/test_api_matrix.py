"""Every route of the OpenAPI document, called by callers that may not see what they ask for: nothing leaks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.openapi.models import OpenAPI
from plane import SPEC, TOKEN, Served, piece, served
from wheels import push_body, wheel

from tandem.control.tokens import attempt_token
from tandem.dashboard.service import page_paths
from tandem.shapes.runs import SCOPES

CANARY = "canary7"
PACKAGE = f"{CANARY}-org-shout"
WHEEL = push_body(wheel(PACKAGE))
BODIES: dict[str, Any] = {
    "/api/plans": {"spec_toml": SPEC, "target": "box"},
    "/api/runs": {"spec_toml": SPEC, "target": "box"},
    "/api/runs/{id}/cancel": {},
    "/api/runs/{id}/resume": {},
    "/api/login": {"id_token": "a.b.c"},
    "/api/orgs": {"name": "another"},
    "/api/projects": {"name": "another"},
    "/api/keys": {"name": "another", "scopes": ["keys"]},
    "/api/keys/{id}/revoke": {},
    "/api/secrets": {"name": "ANOTHER", "value": "v"},
    "/api/secrets/{id}/delete": {},
    "/api/deployments": {"name": "another", "run": "run_" + "a" * 26, "step": 1},
    "/api/deployments/{id}/promote": {"revision": 1},
    "/api/deployments/{id}/rollback": {},
    "/api/deployments/{id}/undeploy": {},
    "/api/packages": push_body(wheel("another-org-shout")),
    "/api/packages/{id}/yank": {"version": "1.0"},
    "/v1/chat/completions": {"model": "hidden-name", "messages": []},
    "/v1/completions": {"model": "hidden-name", "prompt": "p"},
    "/v1/responses": {"model": "hidden-name", "input": "p"},
    "/v1/embeddings": {"model": "hidden-name", "input": "p"},
    "/v1/feedback": {"id": "chatcmpl-1.hidden-name@1", "value": True},
    "/api/attempts/{id}/claim": {"instance": "thief"},
    "/api/attempts/{id}/append": {"instance": "thief", "pieces": [piece("log.txt", 1, 0, b"x")]},
    "/api/attempts/{id}/end": {"instance": "thief", "state": "failed"},
}
OF_AGENTS = {path for path in BODIES if "/attempts/{id}/" in path} | {
    "/api/attempts/{id}/simple/{name}/", "/api/attempts/{id}/simple/{name}/{file}",
}  # fmt: skip
ANOTHERS_NAME = {("post", "/api/packages")}
"""The name begins with another org's."""
WITHOUT_KEY = {"/health", "/openapi.json", "/api/login", *page_paths()}
OF_TWO_RUNS = {"/api/views/compare"}
NAMED_IN_BODY = {
    "/api/deployments", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/feedback",
}  # fmt: skip
OPERATORS = {("post", "/api/orgs"), ("get", "/metrics")}


@dataclass(frozen=True)
class World:
    """An org with a run, which the callers of the tests must not see."""

    plane: Served
    document: dict[str, Any]
    run: str
    attempt: str
    token: str
    key: str
    secret: str

    def operations(self) -> Iterator[tuple[str, str, list[str]]]:
        """Method, path and needed scopes of each route that is not open."""
        for path, each in self.document["paths"].items():
            for method, operation in each.items():
                if path not in WITHOUT_KEY:
                    security = operation.get("security", [{"token": []}])
                    yield method, path, security[0]["token"]

    def call(self, method: str, path: str, key: str) -> Any:
        ids = {"runs": self.run, "views": self.run, "attempts": self.attempt, "keys": self.key, "secrets": self.secret}
        ids |= {"deployments": "hidden-name", "packages": PACKAGE, "simple": PACKAGE}
        parts = path.split("/")
        part = parts[2] if parts[1] == "api" and len(parts) > 2 else parts[1]
        name = "log.txt" if part == "runs" else PACKAGE if part == "attempts" else WHEEL["file"]
        filled = path.replace("{id}", ids.get(part, "")).replace("{name}", name).replace("{file}", WHEEL["file"])
        if path in OF_TWO_RUNS:
            filled += f"?run={self.run}&run={self.run}"
        body = BODIES[path] if method == "post" else None
        if path == "/api/deployments" and body:
            body = {**body, "run": self.run}
        return asyncio.run(self._within(20.0, method.upper(), filled, key, body))

    async def _within(self, seconds: float, method: str, path: str, key: str, body: Any) -> httpx.Response:
        """The answer; a stream that a caller should not get would not end by itself."""
        try:
            async with asyncio.timeout(seconds):
                return await self.plane.ask_async(method, path, key, body)
        except TimeoutError:
            return httpx.Response(200, text="a stream that does not end")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    plane = served(tmp_path_factory.mktemp("matrix"))
    org = plane.made("/api/orgs", {"name": f"{CANARY} org"})["id"]
    theirs = plane.key(*SCOPES, org=org)
    plane.made("/api/projects", {"name": f"{CANARY}-project"}, theirs)
    key = plane.made("/api/keys", {"name": f"{CANARY}-key", "scopes": ["keys"]}, theirs)["id"]
    secret = {"name": f"{CANARY}_secret".upper(), "value": f"{CANARY}-value", "project": f"{CANARY}-project"}
    of_run = plane.made("/api/secrets", secret, theirs)
    run = plane.submit(
        theirs, secrets=[secret["name"]], name=f"{CANARY}-run", project=f"{CANARY}-project", group=CANARY
    )
    plane.made("/api/deployments", {"name": "hidden-name", "run": run, "step": 1}, theirs)
    plane.made("/api/packages", {**WHEEL, "project": f"{CANARY}-project"}, theirs)
    attempt, token = plane.open_attempt(run)
    claimed = plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)
    assert claimed["secrets"] == {secret["name"]: secret["value"]}
    sent = {"instance": "i", "pieces": [piece("log.txt", 1, 0, CANARY.encode())]}
    plane.made(f"/api/attempts/{attempt}/append", sent, token)
    document = plane.ask("GET", "/openapi.json", "").json()
    yield World(plane, document, run, attempt, token, key, of_run["id"])
    log = plane.ask("GET", f"/api/runs/{run}/files/log.txt", theirs)
    assert log.text == CANARY  # nothing above was written
    found = plane.ask("GET", f"/api/runs/{run}", theirs).json()
    assert (found["want"], found["name"]) == ("run", f"{CANARY}-run")
    assert [each["version"] for each in plane.ask("GET", "/api/secrets", theirs).json()["items"]] == [1]
    assert not any(each["revoked_at"] for each in plane.ask("GET", "/api/keys", theirs).json()["items"])
    plane.plane.store.close()


def test_the_document_is_whole_and_open(world: World):
    OpenAPI.model_validate(world.document)
    posts = {path for path, each in world.document["paths"].items() if "post" in each}
    assert posts == BODIES.keys()
    assert len(list(world.operations())) >= 26
    for path in world.document["paths"]:
        named = set(re.findall(r"{(\w+)}", path))
        assert named <= {"id", "name", "file"}, path


def test_credentials_that_are_none_get_401_everywhere(world: World):
    plane = world.plane
    now = plane.now[0]
    revoked = plane.made("/api/keys", {"name": "r", "scopes": list(SCOPES)})
    plane.made(f"/api/keys/{revoked['id']}/revoke", {})
    expired = plane.made("/api/keys", {"name": "e", "scopes": list(SCOPES), "expires_at": now + 1})
    plane.now[0] += 10
    living = plane.key("runs:read")
    dead = [
        "", "wrong", revoked["key"], expired["key"], living[:-1], living + "0", living.replace("tdm", "tda"),
        attempt_token(b"another secret", world.attempt), world.token[:-1], TOKEN.upper(),
        f"tdm_{world.key.removeprefix('key_')}_{'0' * 64}",
    ]  # fmt: skip
    wrong = [
        (method, path, key[:12], answer.status_code)
        for method, path, _ in world.operations()
        for key in dead
        if (answer := world.call(method, path, key)).status_code != 401 or CANARY in answer.text
    ]
    assert wrong == []


def test_a_key_of_another_org_or_project_sees_nothing_of_this_one(world: World):
    plane = world.plane
    other = plane.made("/api/orgs", {"name": "other"})["id"]
    keys = {
        "other org": plane.key(*SCOPES, org=other),
        "operator": TOKEN,
        "project": plane.key(*SCOPES, maker=plane.key(*SCOPES, org=other), project="default"),
    }
    theirs_of_a_project = plane.key(*SCOPES, maker=_owner(world), project="default")
    keys["same org, other project"] = theirs_of_a_project
    leaks: list[object] = []
    for name, key in keys.items():
        for method, path, _ in world.operations():
            answer = world.call(method, path, key)
            expected = (
                {401}
                if path in OF_AGENTS
                else {409}
                if (method, path) in ANOTHERS_NAME
                else {404}
                if "{id}" in path or path in OF_TWO_RUNS or (method == "post" and path in NAMED_IN_BODY)
                else {200, 201, 403}
            )
            names_it = (method, path) in {("get", "/api/me"), ("post", "/api/packages")}
            own_org = name == "same org, other project" and names_it
            made_by_it = f"{CANARY} org" if (name, path) == ("operator", "/api/audit") else "\0"
            own_words = PACKAGE if "{id}" in path else "\0"
            leaked = CANARY in answer.text.replace(made_by_it, "").replace(own_words, "") and not own_org
            if answer.status_code not in expected or leaked:
                leaks.append((name, method, path, answer.status_code, answer.text[:200]))
    assert leaks == []


def _owner(world: World) -> str:
    """A further key of the canary's org, made by the operator."""
    org = next(iter({caller.org for caller in world.plane.plane.callers.rows() if caller.id == world.key}))
    return world.plane.key(*SCOPES, org=org)


def test_a_scope_is_needed_where_the_document_says_so_and_nowhere_else(world: World):
    plane = world.plane
    one_each = {scope: plane.key(scope) for scope in SCOPES}
    all_but = {scope: plane.key(*(set(SCOPES) - {scope})) for scope in SCOPES}
    wrong: list[object] = []
    for method, path, needed in world.operations():
        if path in OF_AGENTS or (method, path) in OPERATORS:
            continue
        for scope in SCOPES:
            lacking = world.call(method, path, all_but[scope]).status_code
            having = world.call(method, path, one_each[scope]).status_code
            allowed = not needed or scope in needed
            if (lacking == 403) is not (scope in needed) or (having == 403) is allowed:
                wrong.append((method, path, needed, scope, lacking, having))
    assert wrong == []


def test_the_operators_routes_are_closed_to_every_key(world: World):
    key = world.plane.key(*SCOPES)
    assert [world.call(method, path, key).status_code for method, path in sorted(OPERATORS)] == [403, 403]


def test_an_agent_speaks_for_its_own_attempt_only(world: World):
    plane = world.plane
    run = plane.submit()
    _, token = plane.open_attempt(run)
    for method, path, _ in world.operations():
        answer = world.call(method, path, token)
        expected = 404 if path in OF_AGENTS else 401
        assert (answer.status_code, CANARY in answer.text) == (expected, False), (method, path)
    for path in OF_AGENTS & BODIES.keys():  # the right token, another execution
        answer = world.call("post", path, world.token)
        assert (answer.status_code, CANARY in answer.text) == (409, False), path


def test_a_key_gives_no_more_than_it_has(world: World):
    plane = world.plane
    maker = plane.key("keys", "runs:read")
    of_project = plane.key("keys", "runs:read", project="default")
    for key, body, status in [
        (maker, {"scopes": ["runs:read", "runs:write"]}, 403),
        (maker, {"scopes": ["runs:read"]}, 201),
        (of_project, {"scopes": ["runs:read"]}, 403),
        (of_project, {"scopes": ["runs:read"], "project": "default"}, 201),
        (maker, {"scopes": ["runs:read"], "org": _org_of(world)}, 404),
    ]:
        assert plane.ask("POST", "/api/keys", key, {"name": "n", **body}).status_code == status, body


def _org_of(world: World) -> str:
    return next(row.org for row in world.plane.plane.callers.rows() if row.id == world.key)


def test_a_key_is_shown_once_and_is_in_no_page_of_the_database(world: World):
    plane = world.plane
    body = {"name": "secret", "scopes": ["runs:read"]}
    first = plane.ask("POST", "/api/keys", body=body, Idempotency_Key="only-once")
    again = plane.ask("POST", "/api/keys", body=body, Idempotency_Key="only-once")
    assert (first.status_code, again.status_code) == (201, 409)
    key = first.json()["key"]
    assert key.rpartition("_")[2] not in again.text
    assert all(not each["key"] for each in plane.ask("GET", "/api/keys").json()["items"])
    data = plane.plane.mirror.directory.parent / "data"
    for path in data.iterdir():
        assert key.rpartition("_")[2].encode() not in path.read_bytes(), path.name


def test_a_revoked_key_is_dead_at_once_and_after_a_restart(tmp_path: Path):
    plane = served(tmp_path)
    made = plane.made("/api/keys", {"name": "k", "scopes": ["runs:read"]})
    assert plane.ask("GET", "/api/me", made["key"]).json()["key"] == made["id"]
    plane.made(f"/api/keys/{made['id']}/revoke", {})
    assert plane.ask("GET", "/api/me", made["key"]).status_code == 401
    plane.plane.store.close()
    again = served(tmp_path)
    assert again.ask("GET", "/api/me", made["key"]).status_code == 401
    assert again.ask("GET", "/api/me").json()["operator"]
    again.plane.store.close()


def test_no_body_of_bytes_gets_a_5xx(world: World):
    plane = world.plane
    bodies = [b"[1]", b"{", b'{"surprise": 1}', b"null", b'"\\ud800"', b'{"name": "a\\u0000b"}', b"[" * 10_000]
    for method, path, _ in world.operations():
        if method != "post":
            continue
        key = world.token if path in OF_AGENTS else TOKEN
        filled = path.replace("{id}", world.attempt if path in OF_AGENTS else "run_%00")
        for body in bodies:
            answer = plane.ask("POST", filled, key, body)
            assert 400 <= answer.status_code < 500, (path, body[:20], answer.status_code)
            known = world.document["paths"][path]["post"]["responses"]
            assert str(answer.status_code) in known, (path, answer.status_code)
    assert asyncio.run(plane.ask_async("GET", "/api/runs/%00")).status_code == 404
