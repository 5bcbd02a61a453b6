"""Requests to the replicas of deployments: a control plane in this process, and replicas that the test plays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_replica import FakeReplica, replica, saying
from plane import SPEC, TOKEN, Served, served

from tandem.control.api.deployment_routes import pick
from tandem.control.api.upkeep import look_once
from tandem.control.deployments import Candidate
from tandem.control.replicas import DRAIN_MS, Replicas
from tandem.shapes.agent import weights_of

ON_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
"""For tests to which the database is nothing: PostgreSQL would only take its time."""


@pytest.fixture
def plane(tmp_path: Path, database: str) -> Iterator[Served]:
    made = served(tmp_path, database)
    yield made
    made.plane.store.close()


class Names:
    """A name with revisions, each with a claimed attempt whose agent the test plays."""

    def __init__(self, plane: Served, **more: Any) -> None:
        self.plane, self.run = plane, plane.submit(**more)
        self.agents: dict[int, tuple[str, str]] = {}

    def deploy(self, **more: Any) -> int:
        body = {"name": "support", "run": self.run, "step": len(self.agents) + 1, **more}
        n = self.plane.made("/api/deployments", body)["revisions"][-1]["n"]
        self.start(n)
        return n

    def start(self, n: int) -> None:
        """Do what the loop and an agent do for a revision's replica."""
        attempt, token = self.plane.open_attempt(self.plane.replica_runs()[n - 1])
        self.plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)
        self.agents[n] = attempt, token

    async def alive(self, n: int, at: FakeReplica | None) -> str:
        """Send the agent's sign of life; return what it should do."""
        attempt, token = self.agents[n]
        served = {weights_of(f"support@{n}", self.run, n): ""}
        body = {"instance": "i", "serving": at.url if at else "", "served": served}
        told = await self.plane.ask_async("POST", f"/api/attempts/{attempt}/append", token, body)
        assert told.status_code == 200, told.text
        return told.json()["want"]

    async def ask(self, model: str = "support", **more: Any) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}
        return await self.plane.ask_async("POST", "/v1/chat/completions", TOKEN, body)

    async def shown(self) -> list[dict[str, Any]]:
        return (await self.plane.ask_async("GET", "/api/deployments/support")).json()["revisions"]


def test_an_undeployed_replica_answers_what_it_has_begun_and_then_ends(plane: Served):
    names = Names(plane)
    names.deploy()
    asked, go = asyncio.Event(), asyncio.Event()

    async def slowly(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.set()
        await go.wait()
        return 200, {"text": "whole"}

    async def play() -> None:
        async with replica(slowly) as fake:
            assert await names.alive(1, fake) == "run"
            answer = asyncio.create_task(names.ask())
            await asked.wait()
            assert (await plane.ask_async("POST", "/api/deployments/support/undeploy", body={})).status_code == 200
            assert [await names.alive(1, fake) for _ in range(3)] == ["run"] * 3
            assert (await names.ask()).status_code == 404
            go.set()
            told = await answer
            assert (told.status_code, told.json(), told.headers["x-tandem-revision"]) == (
                200, {"text": "whole"}, "support@1",
            )  # fmt: skip
            assert await names.alive(1, fake) == "stop"

    asyncio.run(play())


def test_a_replica_that_is_told_to_end_gets_no_further_request_and_waits_no_longer_than_the_drain():
    replicas = Replicas()
    replicas.seen("run", "attempt", "http://127.0.0.1:1", 0, {})
    with replicas.asked("run"):
        assert not replicas.may_end("run", "attempt", 0)
        assert replicas.find("run", 1) is not None
        assert not replicas.may_end("run", "attempt", DRAIN_MS)
        assert replicas.may_end("run", "attempt", DRAIN_MS + 1)
    replicas.seen("run", "attempt", "http://127.0.0.1:1", DRAIN_MS, {})
    assert replicas.find("run", DRAIN_MS) is None
    replicas.seen("run", "another", "http://127.0.0.1:2", DRAIN_MS, {})
    assert replicas.find("run", DRAIN_MS) is not None


@ON_SQLITE
def test_a_replica_that_cannot_be_reached_is_asked_again_where_it_is_next(plane: Served):
    names = Names(plane)
    names.deploy()

    async def play() -> None:
        async with replica(saying("gone")) as gone:
            await names.alive(1, gone)
        async with replica(saying("here")) as fake:
            answer = asyncio.create_task(names.ask())
            await asyncio.sleep(0)
            while not answer.done():
                await names.alive(1, fake)
                await asyncio.sleep(0.02)
            assert answer.result().json()["text"] == "here"

    asyncio.run(play())


@ON_SQLITE
def test_a_connection_that_is_closed_before_the_answer_is_made_again_once(plane: Served):
    names = Names(plane)
    names.deploy()

    async def play() -> None:
        async with replica(saying("here")) as fake:
            await names.alive(1, fake)
            for hang_ups, status, asked in ((0, 200, 1), (1, 200, 2), (2, 503, 2), (0, 200, 1)):
                fake.asked.clear()
                fake.hang_ups = hang_ups
                assert ((await names.ask()).status_code, len(fake.asked)) == (status, asked)

    asyncio.run(play())


def test_weights_share_the_requests_out_and_a_session_stays_with_its_revision():
    found = [
        Candidate("d", 1, "r1", weight=70),
        Candidate("d", 2, "r2", weight=30),
        Candidate("d", 3, "r3", 0, canary=0.1),
    ]
    names = [str(number) for number in range(4000)]
    shares = Counter(pick(found, name, lambda _: True).n for name in names)
    assert shares[1] / 4000 == pytest.approx(0.63, abs=0.03)
    assert shares[2] / 4000 == pytest.approx(0.27, abs=0.03)
    assert shares[3] / 4000 == pytest.approx(0.1, abs=0.02)
    alone = Counter(pick(found, "", lambda _: True).n for _ in names)
    assert alone[3] / 4000 == pytest.approx(0.1, abs=0.03)
    for name in names[:100]:
        assert len({pick(found, name, lambda _: True).n for _ in range(5)}) == 1
    assert {pick(found, name, lambda each: each.n == 2).n for name in names[:100]} == {2}  # the others do not answer
    assert {pick(found, name, lambda _: False).n for name in names[:100]} == {1, 2}


def test_a_canary_gets_its_share_and_is_rolled_back_when_it_fails(plane: Served):
    names = Names(plane)
    names.deploy()
    refused = plane.ask("POST", "/api/deployments", body={"name": "new", "run": names.run, "step": 1, "canary": 0.5})
    assert refused.status_code == 409
    names.deploy(canary=0.5)
    again = {"name": "support", "run": names.run, "step": 1, "canary": 0.5}
    assert "is tried already" in plane.ask("POST", "/api/deployments", body=again).text

    async def fails(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 500, {"error": {"message": "out of memory"}}

    async def play() -> None:
        async with replica(saying("old")) as old, replica(fails) as new:
            await names.alive(1, old)
            assert {(await names.ask()).status_code for _ in range(10)} == {200}  # the canary does not answer yet
            await names.alive(2, new)
            told = Counter([(await names.ask()).status_code for _ in range(60)])
            assert told[500] > 10
            await look_once(plane.plane)
            shown = await names.shown()
            assert [each["canary"] for each in shown] == [0.0, 0.0]
            assert shown[1]["why"].startswith(f"rolled back: {told[500]} of its {told[500]} answers failed, and 0 of")
            assert (shown[1]["errors"]["count"], shown[1]["errors"]["mean"]) == (told[500], 1.0)
            assert shown[0]["errors"]["count"] == 70 - told[500]
            assert {(await names.ask()).status_code for _ in range(20)} == {200}
            log = (await plane.ask_async("GET", "/api/audit")).json()["items"]
            assert [each["told"]["revision"] for each in log if each["action"] == "canary rolled back"] == [2]

    asyncio.run(play())


def test_a_canary_as_good_as_the_others_stays_until_it_is_promoted_or_taken_away(plane: Served):
    names = Names(plane)
    names.deploy()
    names.deploy(canary=0.5)

    async def play() -> None:
        async with replica(saying("old")) as old, replica(saying("new")) as new:
            await names.alive(1, old)
            await names.alive(2, new)
            texts = Counter([(await names.ask()).json()["text"] for _ in range(60)])
            assert min(texts["old"], texts["new"]) > 10
            await look_once(plane.plane)
            assert [each["canary"] for each in await names.shown()] == [0.0, 0.5]
            await plane.ask_async("POST", "/api/deployments/support/rollback", body={})
            assert [(each["canary"], each["weight"]) for each in await names.shown()] == [(0.0, 100), (0.0, 0)]
            await plane.ask_async("POST", "/api/deployments/support/promote", body={"revision": 2})
            assert {(await names.ask()).json()["text"] for _ in range(10)} == {"new"}

    asyncio.run(play())


def test_feedback_reaches_the_replica_that_gave_the_answer_and_is_counted_once(plane: Served):
    names = Names(plane)
    names.deploy(feedback=True)

    async def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path != "/v1/feedback":
            return await saying("here")(path, body)
        if body["id"] == "chatcmpl-x.support@1":
            return 200, {"id": body["id"], "choice": body.get("choice", 0), "value": float(body["value"])}
        return 404, {"error": {"code": "chat_not_found", "message": "there is no such chat"}}

    async def play() -> None:
        async with replica(answer) as fake:
            await names.alive(1, fake)
            id = (await names.ask()).json()["id"]
            for body, status in (
                ({"id": id, "value": True}, 200), ({"id": id, "value": True}, 200),
                ({"id": id, "value": 0.0, "choice": 1}, 200), ({"id": "chatcmpl-y.support@1", "value": True}, 404),
                ({"id": "chatcmpl-y.support@7", "value": True}, 404), ({"id": "chatcmpl-y", "value": True}, 400),
                ({"value": True}, 400),
            ):  # fmt: skip
                told = await plane.ask_async("POST", "/v1/feedback", TOKEN, body)
                assert told.status_code == status, (body, told.text)
            await look_once(plane.plane)
            shown = (await names.shown())[0]
            assert (shown["feedback"]["count"], shown["feedback"]["mean"]) == (2, 0.5)
            assert shown["errors"]["count"] == 1  # feedback is no answer

    asyncio.run(play())


def test_a_replica_that_no_request_reaches_sleeps_and_the_next_request_wakes_it(
    plane: Served, monkeypatch: pytest.MonkeyPatch
):
    names = Names(plane)
    names.deploy(keep_s=60)
    run = plane.replica_runs()[0]

    async def play() -> None:
        async with replica(saying("awake")) as fake:
            await names.alive(1, fake)
            plane.now[0] += 69_000  # at its start ten seconds more: a client that was told to ask again is on its way
            await names.alive(1, fake)
            await look_once(plane.plane)
            assert await names.alive(1, fake) == "run"
            assert (await names.ask()).status_code == 200
            await look_once(plane.plane)
            plane.now[0] += 59_000
            await names.alive(1, fake)
            await look_once(plane.plane)
            assert await names.alive(1, fake) == "run"
            plane.now[0] += 2_000
            await names.alive(1, fake)
            await look_once(plane.plane)
            assert await names.alive(1, fake) == "stop"
        await asyncio.to_thread(plane.close_attempt, run, "stopped")
        shown = (await names.shown())[0]
        assert (shown["asleep"], shown["ready"], shown["state"]) == (True, False, "stopped")
        listed = (await plane.ask_async("GET", "/v1/models")).json()["data"]
        assert {each["id"]: each["asleep"] for each in listed} == {"support": True, "support@1": True}
        asked = {"model": "support", "messages": [{"role": "user", "content": "hi"}]}
        told = await plane.ask_async("POST", "/v1/chat/completions", body=asked, X_Tandem_Wake="no")
        assert (told.status_code, (await names.shown())[0]["state"]) == (409, "stopped")
        monkeypatch.setattr("tandem.control.api.deployment_routes.WAIT_S", 0.1)
        for _ in range(2):  # the first wakes it; neither is a failure of its
            told = await names.ask()
            assert (told.status_code, told.headers["retry-after"]) == (503, "5")
        assert (await names.shown())[0]["state"] == "queued"
        await look_once(plane.plane)
        assert [(await names.shown())[0]["errors"][what] for what in ("count", "mean")] == [1, 0]
        monkeypatch.setattr("tandem.control.api.deployment_routes.WAIT_S", 30.0)
        answer = asyncio.create_task(names.ask())
        await asyncio.to_thread(names.start, 1)
        async with replica(saying("again")) as fake:
            while not answer.done():
                await names.alive(1, fake)
                await asyncio.sleep(0.02)
        assert answer.result().json()["text"] == "again"

    asyncio.run(play())


@ON_SQLITE
def test_a_name_without_a_replica_says_when_to_ask_again(plane: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tandem.control.api.deployment_routes.WAIT_S", 0.2)
    names = Names(plane)
    names.deploy()
    told = asyncio.run(names.ask())
    assert (told.status_code, told.headers["retry-after"]) == (503, "5")
    assert "'support@1' does not answer now" in told.text
    run = plane.replica_runs()[0]
    plane.close_attempt(run, "waiting")
    plane.open_attempt(run)
    assert asyncio.run(names.shown())[0]["why"] == "start 2; before: closed by the test"
    plane.close_attempt(run, "failed")
    monkeypatch.setattr("tandem.control.api.deployment_routes.WAIT_S", 60.0)
    told = asyncio.run(names.ask())  # at once
    assert (told.status_code, told.headers.get("retry-after")) == (503, None)
    assert "`tandem deployments support` says why" in told.text


LORA = SPEC.replace('{ preset = "tiny" }', '{ preset = "tiny", lora = { rank = 4 } }')


def test_adapters_of_one_base_share_a_replica_and_others_do_not(plane: Served):
    names = Names(plane, spec_toml=LORA)
    names.deploy()
    another = plane.submit(spec_toml=LORA.replace("rank = 4", "rank = 8"))
    plane.made("/api/deployments", {"name": "support", "run": another, "step": 7})
    plane.made("/api/deployments", {"name": "sales", "run": another, "step": 8})
    first, *rest = plane.replica_runs()
    assert rest == [first, first]
    for spec in (SPEC, LORA.replace("tiny", "small"), f"seed = 5\n{LORA}"):
        other = plane.submit(spec_toml=spec)
        plane.made("/api/deployments", {"name": "apart", "run": other, "step": 1})
    plane.made("/api/deployments", {"name": "apart", "run": another, "step": 1, "feedback": True})
    assert len(set(plane.replica_runs())) == 5

    async def play() -> None:
        async with replica(saying("here")) as fake:
            attempt, token = names.agents[1]
            own, second = weights_of("support@1", names.run, 1), weights_of("support@2", another, 7)
            body = {"instance": "i", "serving": fake.url, "served": {own: ""}}
            path = f"/api/attempts/{attempt}/append"
            told = (await plane.ask_async("POST", path, token, body)).json()
            assert told["adapters"] == [
                {"model": "sales@1", "run": another, "step": 8}, {"model": "support@1", "run": names.run, "step": 1},
                {"model": "support@2", "run": another, "step": 7},
            ]  # fmt: skip
            assert [each["ready"] for each in await names.shown()] == [True, False]
            assert (await names.shown())[1]["why"] == "its replica is loading it"
            refused = await plane.ask_async("POST", "/api/deployments/support/promote", body={"revision": 2})
            assert refused.status_code == 409
            sales = {weights_of("sales@1", another, 8): "step 8 is not served"}
            body["served"] = {own: "", second: "", **sales}
            await plane.ask_async("POST", path, token, body)
            assert (await names.ask("support@2")).json()["model"] == "support@2"
            shown = (await plane.ask_async("GET", "/api/deployments/sales")).json()["revisions"][0]
            assert (shown["ready"], shown["why"]) == (False, "step 8 is not served")
            await plane.ask_async("POST", "/api/deployments/support/undeploy", body={})
            assert (await plane.ask_async("POST", path, token, body)).json()["want"] == "run"  # sales is there
            again = {"name": "support", "run": another, "step": 8}
            await plane.ask_async("POST", "/api/deployments", body=again)
            for _ in range(2):  # the replica has a support@1, but with other weights
                assert [each["ready"] for each in await names.shown()] == [False]
                await plane.ask_async("POST", path, token, body)
            body["served"] = {weights_of("support@1", another, 8): "", **sales}
            await plane.ask_async("POST", path, token, body)
            assert (await names.ask()).json()["model"] == "support@1"
            await plane.ask_async("POST", "/api/deployments/support/undeploy", body={})
            await plane.ask_async("POST", "/api/deployments/sales/undeploy", body={})
            assert (await plane.ask_async("POST", path, token, body)).json()["want"] == "stop"

    asyncio.run(play())


def test_a_run_is_served_by_vllm_only_if_it_names_one_and_apart_from_the_embedded_engine(plane: Served):
    body = {"name": "support", "run": plane.submit(spec_toml=LORA), "step": 1}
    refused = plane.ask("POST", "/api/deployments", body={**body, "engine": "vllm"})
    assert (refused.status_code, refused.json()["error"]["field"]) == (409, "engine")
    plane.made("/api/deployments", body)
    run = plane.submit(spec_toml=f'{LORA}\n[engine]\nkind = "vllm"\n')
    for step, engine in enumerate(["hf", "vllm", "vllm"]):
        plane.made("/api/deployments", {**body, "run": run, "step": step, "engine": engine})
    first, *rest = plane.replica_runs()
    assert rest[0] == first
    assert rest[1] == rest[2] != first
    attempt, token = plane.open_attempt(rest[1])
    told = plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)
    assert told["serve"]["engine"] == "vllm"


def test_a_run_on_another_machine_is_not_deployed(plane: Served):
    run = plane.submit(target="free")
    told = plane.ask("POST", "/api/deployments", body={"name": "support", "run": run, "step": 1})
    assert (told.status_code, told.json()["error"]["field"]) == (422, "target")
    assert "is on another machine" in told.json()["error"]["message"]
