"""/mcp of a real `tandem control serve`, by the SDK's own client: an assistant may do what its key may, and no more."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import httpx2
import pytest
from assistant_answers import answering
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from whole_way import Control, spec_of, until

OPENING = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}
READING = ("get_run", "explain", "read_log", "get_metrics", "read_samples", "list_checkpoints", "watch")


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    made = Control(tmp_path_factory.mktemp("control"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def ended(control: Control) -> str:
    run = control.submit(3)
    until(lambda: control.state(run) == "succeeded", 300)
    return run


def url(control: Control) -> str:
    return f"http://127.0.0.1:{control.port}/mcp"


def with_client(
    control: Control, token: str, use: Callable[[Client], Awaitable[Any]], answers: Any = None, mode: Any = "auto"
) -> Any:
    """Connect as an assistant does, and use the connection. `mode`: the newest protocol, or "legacy", with a session
    over which the server asks."""

    async def connected() -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
            there = streamable_http_client(url(control), http_client=http)
            async with Client(there, elicitation_callback=answers, mode=mode) as client:
                return await use(client)

    return asyncio.run(connected())


def call(
    control: Control, token: str, name: str, arguments: dict[str, Any], answers: Any = None, mode: Any = "auto"
) -> Any:
    """The answer of one call, or the text of its error."""

    async def use(client: Client) -> Any:
        result = await client.call_tool(name, arguments)
        return result.content[0].text if result.is_error else result.structured_content  # type: ignore[union-attr]

    return with_client(control, token, use, answers, mode)


def planned(control: Control, token: str, steps: int) -> dict[str, Any]:
    asked = {"spec_toml": spec_of(control.home, steps), "target": "here", "max_cost_usd": 1.0}
    found = call(control, token, "plan", asked)
    assert found["fits"], found
    return {**asked, "plan_digest": found["plan_digest"]}


def runs(control: Control) -> int:
    return len(control.ask("GET", "/api/runs")["items"])


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_an_assistant_plans_submits_watches_and_explains(control: Control, mode: str):
    token, asked = control.key("runs:read", "runs:write"), list[str]()
    arguments = planned(control, token, 2)
    yes = answering("accept", {"yes": True}, asked)
    run = call(control, token, "submit", arguments, yes, mode)["run"]
    assert call(control, token, "submit", arguments, yes, mode)["run"] == run  # the same plan is the same run
    assert [words.split("Planned:")[0] for words in asked] == [
        "Submit 'ascii' to here and spend at most 1 USD? "
    ]  # fmt: skip
    until(lambda: call(control, token, "watch", {"run": run, "seconds": 2})["state"] == "succeeded", 300)
    assert "nothing is wrong" in call(control, token, "explain", {"run": run})["next"]
    assert any(row["run"] == run for row in call(control, token, "usage", {})["usage"])


def test_every_tool_that_reads_answers(control: Control, ended: str):
    arguments: dict[str, dict[str, Any]] = {
        "compare": {"runs": [ended, ended]}, "plan": {"spec_toml": spec_of(control.home, 1)}, "list_runs": {},
        "targets": {}, "usage": {}, "watch": {"run": ended, "seconds": 0}, "deployments": {},
    }  # fmt: skip

    async def use(client: Client) -> dict[str, Any]:
        found = dict[str, Any]()
        for tool in (await client.list_tools()).tools:
            assert tool.annotations is not None
            assert "context" not in tool.input_schema["properties"]
            if tool.annotations.read_only_hint:
                found[tool.name] = await client.call_tool(tool.name, arguments.get(tool.name, {"run": ended}))
        spec = await client.read_resource(f"tandem://runs/{ended}/spec")
        found["the spec"] = spec.contents[0].text  # type: ignore[union-attr]
        return found

    found = with_client(control, control.key("runs:read", "runs:write", "deploy"), use)
    assert found.pop("the spec") == (control.mirror(ended) / "spec.toml").read_text()
    assert found.keys() == {*arguments, *READING}
    assert [name for name, result in found.items() if result.is_error] == []
    assert found["read_samples"].structured_content["quoted"][0]["step"] == 3
    saved = found["list_checkpoints"].structured_content["checkpoints"]
    assert [(each["step"], each["kept"]) for each in saved] == [(3, True), (2, True), (1, False)]
    there = {path.name for path in (control.directory(ended) / "checkpoints").glob("step-*")}
    assert {f"step-{each['step']}" for each in saved if each["kept"]} == there


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize(
    ("action", "content"), [("decline", None), ("cancel", None), ("accept", {"yes": False}), ("accept", {"yes": "no"})]
)
def test_nothing_is_spent_without_a_yes(control: Control, ended: str, action: str, content: Any, mode: str):
    token, asked = control.key("runs:read", "runs:write"), list[str]()
    arguments, before = planned(control, token, 2), runs(control)
    for _ in range(5):  # 120 in all
        for name, more in (("submit", arguments), ("resume", {"run": ended}), ("cancel", {"run": ended})):
            told = call(control, token, name, more, answering(action, content, asked), mode)
            assert isinstance(told, str), told
    assert len(asked) == 15
    assert runs(control) == before
    assert control.state(ended) == "succeeded"


def test_a_client_that_cannot_ask_is_told_the_command(control: Control):
    token = control.key("runs:read", "runs:write")
    arguments, before = planned(control, token, 2), runs(control)
    assert "a person can run: tandem submit SPEC --target here" in call(control, token, "submit", arguments)
    assert runs(control) == before


def test_what_a_key_may_not_do_an_assistant_with_it_may_not(control: Control, ended: str):
    reader, asked = control.key("runs:read"), list[str]()
    arguments, before = planned(control, control.token, 2), runs(control)
    yes = answering("accept", {"yes": True}, asked)
    assert "call plan first" in call(control, reader, "submit", arguments, yes)  # the plan is another key's
    refused = "this key has not the scope 'runs:write'"
    assert refused in call(control, reader, "plan", {name: arguments[name] for name in ("spec_toml", "target")})
    for name in ("resume", "cancel"):
        assert refused in call(control, reader, name, {"run": ended}, yes)
    assert runs(control) == before
    assert "this key has not the scope 'runs:read'" in call(control, control.key("keys"), "list_runs", {})
    control.ask("POST", "/api/projects", {"name": "other"})
    other = control.key("runs:read", project="other")
    assert call(control, other, "list_runs", {})["runs"] == []
    for name in READING:
        assert "there is no run" in call(control, other, name, {"run": ended})
    assert "there is no run" in call(control, other, "compare", {"runs": [ended, ended]})


@pytest.mark.parametrize("run", ["..", "/etc", "../token", "nothing"])
def test_only_runs_of_the_server_are_read(control: Control, run: str):
    for name in READING:
        assert "must be the id of a run" in call(control, control.token, name, {"run": run})


def test_the_gate_stands_before_it_and_a_session_is_its_keys(control: Control):
    mine, other = control.key("runs:read"), control.key("runs:read")
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}

    def post(token: str, body: Any, **more: str) -> httpx.Response:
        sent = {**headers, **({"Authorization": f"Bearer {token}"} if token else {}), **more}
        return httpx.post(url(control), json=body, headers=sent, timeout=30)

    assert post("", OPENING).status_code == 401
    assert post("wrong", OPENING).status_code == 401
    assert post(mine, OPENING, Origin="https://evil.example").status_code == 403
    assert post(mine, OPENING, Host="evil.example").status_code == 421
    opened = post(mine, OPENING)
    assert opened.status_code == 200
    session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
    asked = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}
    assert post(mine, asked, **session).status_code == 200
    assert post(other, asked, **session).status_code == 404


def test_a_server_with_an_open_session_ends_without_waiting_for_it(control: Control):
    """Its client listens for what the server may ask, for as long as the session lives."""
    headers = {
        "Accept": "application/json, text/event-stream", "Authorization": f"Bearer {control.token}",
    }  # fmt: skip
    with httpx.Client(headers=headers, timeout=60) as client:
        opened = client.post(url(control), json=OPENING)
        session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
        told = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert client.post(url(control), json=told, headers=session).status_code == 202
        with client.stream("GET", url(control), headers=session) as listening:
            assert listening.status_code == 200
            control.process.send_signal(signal.SIGTERM)
            with suppress(httpx.RemoteProtocolError):  # it may be cut off
                assert "".join(listening.iter_text()) == ""
    assert control.process.wait(60) == 0
    control.start()
