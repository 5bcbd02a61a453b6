"""An online server behind a name: a real `tandem online serve`, asked through a control plane."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_replica import replica
from plane import Served, served

from tandem.build.targets import read_online
from tandem.control.replicas import OnlineServer
from tandem.errors import SpecError
from tandem.shapes.deployments import DeployBody

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))

from online_served import SPEC, fact, online_server
from online_served import OnlineServer as OnlineProcess

HELPER = {"name": "helper", "online": "learner"}
CHAT: dict[str, Any] = {
    "model": "helper", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0,
}  # fmt: skip


def another_org(plane: Served) -> str:
    org = plane.made("/api/orgs", {"name": "rivals"})["id"]
    return plane.key("chat", "deploy", org=org)


def test_the_operator_alone_puts_a_server_that_it_has_named_behind_a_name_of_its_own(tmp_path: Path):
    """No body has a URL: what is asked is in the operator's file."""
    plane = served(tmp_path, online={"learner": OnlineServer("http://127.0.0.1:9", "secret", "m")})
    told = plane.ask("POST", "/api/deployments", plane.key("deploy"), HELPER)
    assert told.status_code == 403
    for wrong in ("other", "http://127.0.0.1:9"):
        told = plane.ask("POST", "/api/deployments", body={**HELPER, "online": wrong})
        assert (told.status_code, told.json()["error"]["field"]) == (422, "online")
    for more in ({"url": "http://127.0.0.1:9"}, {"weight": 5}, {"run": "run_x"}, {"engine": "vllm"}, {"keep_s": 9}):
        assert plane.ask("POST", "/api/deployments", body={**HELPER, **more}).status_code == 422
    made = plane.made("/api/deployments", DeployBody.model_validate(HELPER).model_dump())  # as the client sends it
    assert (made["online"], made["revisions"]) == ("learner", [])
    assert "secret" not in str(made)
    assert plane.ask("POST", "/api/deployments", body=HELPER).status_code == 409
    run = plane.submit()
    for path, body in (
        ("/api/deployments", {"name": "helper", "run": run, "step": 1}),
        ("/api/deployments/helper/promote", {"revision": 1}), ("/api/deployments/helper/rollback", {}),
    ):  # fmt: skip
        told = plane.ask("POST", path, body=body)
        assert told.status_code == 409, path
        assert "makes and promotes its own versions" in told.json()["error"]["message"]
    stranger = another_org(plane)
    assert plane.ask("POST", "/v1/chat/completions", stranger, CHAT).status_code == 404
    assert plane.ask("GET", "/api/deployments/helper", stranger).status_code == 404
    assert plane.ask("POST", "/v1/feedback", stranger, {"id": "chatcmpl-1", "value": True}).status_code == 400
    assert plane.ask("POST", "/v1/chat/completions", body={**CHAT, "model": "helper@1"}).status_code == 404
    told = plane.ask("POST", "/v1/chat/completions", body=CHAT)  # nothing listens on port 9
    assert (told.status_code, told.headers["retry-after"]) == (503, "5")
    plane.plane.store.close()


def test_a_redirect_of_an_online_server_is_not_followed(tmp_path: Path):
    online = dict[str, OnlineServer]()
    plane = served(tmp_path, online=online)

    async def moved(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 307, {"model": body["model"]}

    async def play() -> None:
        async with replica(moved) as fake:
            online["learner"] = OnlineServer(fake.url, "secret", "m")
            assert (await plane.ask_async("POST", "/api/deployments", body=HELPER)).status_code == 201
            told = await plane.ask_async("POST", "/v1/chat/completions", body=CHAT)
            assert (told.status_code, told.json(), len(fake.asked)) == (307, {"model": "m"}, 1)

    asyncio.run(play())
    plane.plane.store.close()


def test_the_file_of_targets_names_online_servers_as_its_page_shows(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs/targets.md").read_text()
    shown = page.partition("## Online servers")[2].partition("    [online.learner]")[2].partition("\n\n")[0]
    (file := tmp_path / "targets.toml").write_text(f"[targets]\n[online.learner]{shown}\n")
    found = read_online(file)["learner"]
    assert (found.url, found.token_file, found.model) == ("http://127.0.0.1:8080", "/srv/learner/token", "learner")


@pytest.mark.parametrize("url", ["http://10.0.0.1:80", "http://127.0.0.1.evil.org", "https://user@host", "file:///x"])
def test_an_online_server_is_reached_by_https_or_on_this_machine(tmp_path: Path, url: str):
    (file := tmp_path / "targets.toml").write_text(
        f'[targets]\n[online.learner]\nurl = "{url}"\ntoken_file = "token"\nmodel = "m"\n'
    )
    with pytest.raises(SpecError, match=re.escape("online.learner.url")):
        read_online(file)


@pytest.mark.slow
def test_it_answers_by_its_name_with_its_version_takes_feedback_and_outlives_the_name(tmp_path: Path):
    online = dict[str, OnlineServer]()
    plane = served(tmp_path, online=online)

    async def chat(**more: Any) -> httpx.Response:
        return await plane.ask_async("POST", "/v1/chat/completions", body={**CHAT, **more})

    async def thumb(id: str) -> httpx.Response:
        return await plane.ask_async("POST", "/v1/feedback", body={"id": id, "value": True})

    async def play(server: OnlineProcess) -> None:
        token = str(server.http.headers["Authorization"]).removeprefix("Bearer ")
        model = server.get("/v1/models")["data"][0]["id"]
        online["learner"] = OnlineServer(str(server.http.base_url).rstrip("/"), token, model)
        await plane.ask_async("POST", "/api/deployments", body=HELPER)
        listed = (await plane.ask_async("GET", "/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["helper"]
        before, straight = await chat(), server.ask("hello", 8)
        assert before.json()["choices"][0]["message"] == straight["choices"][0]["message"]
        version = before.json()["weight_version"]
        streamed = await chat(stream=True)
        for told in (before, streamed):
            assert (told.headers["x-tandem-revision"], told.headers["x-tandem-version"]) == ("helper", str(version))
        assert streamed.text.endswith("data: [DONE]\n\n")
        rated = await thumb(before.json()["id"])
        assert (rated.status_code, rated.json()["weight_version"]) == (200, version)
        assert (before.json()["id"].partition(".")[2], before.json()["model"]) == ("helper", "helper")
        assert ".helper" in streamed.text
        assert [(await thumb(f"chatcmpl-unknown{more}")).status_code for more in ("", ".helper", ".h")] == [
            400,
            404,
            404,
        ]
        assert server.wait(server.teach([fact(1)]))["state"] == "published"
        assert int((await chat()).headers["x-tandem-version"]) > version
        assert (await plane.ask_async("POST", "/api/deployments/helper/undeploy", body={})).status_code == 200
        assert (await chat()).status_code == 404
        assert server.ask("hello", 8)["choices"]

    with online_server(tmp_path / "online", SPEC) as process:
        asyncio.run(play(process))
    plane.plane.store.close()
