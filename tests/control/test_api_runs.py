"""Runs over HTTP: submit, list, cancel, resume, events, budgets; the same on every database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from plane import SPEC, Served, piece, served

from tandem.control.tables import Run


@pytest.fixture
def plane(tmp_path: Path, database: str) -> Iterator[Served]:
    made = served(tmp_path, database)
    yield made
    made.plane.store.close()


def test_a_submitted_run_is_queued_once_for_each_idempotency_key(plane: Served):
    body = {"spec_toml": SPEC, "target": "box", "max_cost_usd": 5, "group": "g"}
    first = plane.ask("POST", "/api/runs", body=body, Idempotency_Key="one")
    again = plane.ask("POST", "/api/runs", body=body, Idempotency_Key="one")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    run = first.json()
    assert (run["name"], run["state"], run["project"], run["max_cost_usd"]) == ("sorts", "queued", "default", 5.0)
    assert [each["id"] for each in plane.ask("GET", "/api/runs").json()["items"]] == [run["id"]]
    other = plane.ask("POST", "/api/runs", body=body | {"group": "h"}, Idempotency_Key="one")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "key_reused")
    assert plane.ask("POST", "/api/runs", body=body, Idempotency_Key="two").json()["id"] != run["id"]
    assert plane.woken


TWO_HOSTS = """parallel = { ranks = 4, hosts = 2 }
engine = { kind = "server" }
sync = { bridge = "broadcast" }
"""


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"target": "moon"}, "target", "this server has box, free"),
        ({"spec_toml": "recipe = 1"}, "", "recipe"),
        ({"spec_toml": "recipe = "}, "spec_toml", "is not TOML"),
        ({"spec_toml": SPEC.replace("steps = 1", "steps = -1")}, "", "train.steps"),
        ({"spec_toml": SPEC + TWO_HOSTS}, "", "the target 'box' is of kind 'local', where a job is one host"),
        ({"surprise": 1}, "surprise", ""),
        ({"project": "nowhere"}, "project", "there is none of this name"),
        ({"name": "a\nb"}, "", "name"),
    ],
)
def test_a_wrong_submit_is_refused_by_its_field(plane: Served, change: dict[str, str], field: str, says: str):
    answer = plane.ask("POST", "/api/runs", body={"spec_toml": SPEC, "target": "box"} | change)
    error = answer.json()["error"]
    assert answer.status_code in (404, 422)
    assert error.get("field", "") == field or not field
    assert says in error["message"]
    assert plane.ask("GET", "/api/runs").json()["items"] == []


def test_a_run_on_two_hosts_costs_what_both_cost(plane: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(cast("dict[str, str]", plane.plane.kinds), "box", "slurm")
    run = plane.made("/api/runs", {"spec_toml": SPEC + TWO_HOSTS, "target": "box"})["id"]
    price = asyncio.run(plane.plane.store.read(lambda session: session.get_one(Run, run).usd_per_hour))
    assert price == 2 * plane.plane.prices["box"]


def test_a_page_of_runs_goes_on_where_it_ended(plane: Served):
    made = []
    for _ in range(5):
        plane.now[0] += 1
        made.append(plane.submit())
    first = plane.ask("GET", "/api/runs?limit=3").json()
    second = plane.ask("GET", f"/api/runs?limit=3&before={first['next']}").json()
    assert [each["id"] for each in first["items"] + second["items"]] == made[::-1]
    assert second["next"] == ""
    assert plane.ask("GET", "/api/runs?state=running").json()["items"] == []
    assert plane.ask("GET", "/api/runs?limit=x").status_code == 422


def test_a_cancel_is_wanted_once_and_an_ended_run_can_be_resumed(plane: Served):
    run = plane.submit()
    asked = plane.ask("POST", f"/api/runs/{run}/cancel")
    assert (asked.status_code, asked.json()["want"]) == (202, "cancel")
    assert plane.ask("POST", f"/api/runs/{run}/cancel", body={"save": True}).json()["want"] == "cancel"
    assert plane.ask("POST", f"/api/runs/{run}/resume").status_code == 409
    attempt, _ = plane.open_attempt(run)
    plane.close_attempt(run, "cancelled")
    resumed = plane.ask("POST", f"/api/runs/{run}/resume").json()
    assert (resumed["state"], resumed["want"]) == ("queued", "run")
    attempts = plane.ask("GET", f"/api/runs/{run}/attempts").json()["items"]
    assert [(each["n"], each["state"]) for each in attempts] == [(1, "closed")]
    assert attempt


def test_events_are_pages_or_a_stream_that_goes_on_after_the_last_id(plane: Served):
    run = plane.submit()
    plane.ask("POST", f"/api/runs/{run}/cancel")
    plane.open_attempt(run)
    plane.close_attempt(run, "cancelled")
    page = plane.ask("GET", f"/api/runs/{run}/events").json()["items"]
    assert [(each["n"], each["kind"]) for each in page] == [(1, "state"), (2, "want"), (3, "state"), (4, "state")]
    assert [each["n"] for each in plane.ask("GET", f"/api/runs/{run}/events?after=2").json()["items"]] == [3, 4]
    stream = plane.ask("GET", f"/api/runs/{run}/events", Accept="text/event-stream", Last_Event_ID="2")
    ids = [line for line in stream.text.splitlines() if line.startswith("id: ")]
    assert (stream.status_code, ids) == (200, ["id: 3", "id: 4"])
    missing = plane.ask("GET", "/api/runs/run_none/events", Accept="text/event-stream")
    assert missing.status_code == 404


def test_a_stream_tells_an_event_within_a_second_and_ends_with_the_run(plane: Served):
    run = plane.submit()

    async def both() -> str:
        stream = asyncio.create_task(plane.ask_async("GET", f"/api/runs/{run}/events", Accept="text/event-stream"))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(plane.open_attempt, run)
        await asyncio.to_thread(plane.close_attempt, run, "failed")
        async with asyncio.timeout(3):
            return (await stream).text

    text = asyncio.run(both())
    assert '"state":"failed"' in text
    assert text.count("data: ") == 3


def test_a_budget_is_reserved_when_a_run_is_submitted(plane: Served):
    plane.made("/api/projects", {"name": "small", "budget_usd": 10, "max_live_runs": 2})
    no_limit = plane.ask("POST", "/api/runs", body={"spec_toml": SPEC, "target": "box", "project": "small"})
    assert (no_limit.status_code, no_limit.json()["error"]["field"]) == (409, "max_cost_usd")
    run = plane.submit(project="small", max_cost_usd=8)
    more = {"spec_toml": SPEC, "target": "box", "project": "small", "max_cost_usd": 3}
    refused = plane.ask("POST", "/api/runs", body=more)
    assert refused.status_code == 409
    assert "has 2 of its budget of 10 USD left" in refused.json()["error"]["message"]
    # It ends after an hour at 2 USD: what it did not use is free again.
    attempt, token = plane.open_attempt(run)
    plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)
    for _ in range(60):
        plane.now[0] += 60_000
        plane.made(f"/api/attempts/{attempt}/append", {"instance": "i"}, token)
    plane.made(f"/api/attempts/{attempt}/end", {"instance": "i", "state": "succeeded"}, token)
    plane.close_attempt(run, "succeeded")
    [used] = plane.ask("GET", "/api/usage").json()["items"]
    for query, count in (
        (f"since={used['ended']}", 1),
        (f"since={used['ended'] + 1}", 0),
        (f"until={used['ended']}", 0),
    ):
        assert len(plane.ask("GET", f"/api/usage?{query}").json()["items"]) == count
    assert (used["run"], used["usd"], used["ended"] - used["began"]) == (run, 2.0, 3_600_000)
    assert (
        next(each for each in plane.ask("GET", "/api/projects").json()["items"] if each["name"] == "small")["spent_usd"]
        == 2.0
    )
    assert plane.ask("POST", "/api/runs", body=more).status_code == 201
    plane.submit(project="small", max_cost_usd=5)
    third = plane.ask("POST", "/api/runs", body=more)
    assert (third.status_code, third.json()["error"]["field"]) == (409, "project")
    changed = plane.made("/api/projects", {"name": "small", "max_live_runs": 9})
    assert (changed["budget_usd"], changed["max_live_runs"]) == (10.0, 9)


def test_a_run_says_what_its_mirror_says_and_what_it_costs(plane: Served):
    run = plane.submit()
    attempt, token = plane.open_attempt(run)
    plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)
    pieces = [
        piece("status.json", 1, 0, b'{"state": "running", "steps_total": 9, "verdict": "improved"}'),
        piece("progress.json", 1, 0, b'{"stage": "rl", "step": 4}'),
    ]
    plane.made(f"/api/attempts/{attempt}/append", {"instance": "i", "pieces": pieces}, token)
    plane.now[0] += 1_800_000
    found = plane.ask("GET", f"/api/runs/{run}").json()
    assert (found["stage"], found["step"], found["steps_total"], found["verdict"]) == ("rl", 4, 9, "improved")
    assert found["cost_usd"] == 1.0
