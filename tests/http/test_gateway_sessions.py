"""Gateway sessions: rewards, groups, keys, bounds, expiry, and restarts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_served import Gateway, Says, gateway_serving
from served import MODEL, wait_until

from tandem.rollout.sessions.sessions import Bounds
from tandem.text.renderer import Renderer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def _gateway(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    bounds = Bounds(turns=6, branches=3)
    with gateway_serving(Says(renderer, "x"), renderer, tmp_path_factory.mktemp("sessions"), bounds=bounds) as gateway:
        yield gateway


@pytest.fixture
def gateway(_gateway: Gateway) -> Gateway:
    _gateway.engine.log.clear()
    return _gateway


def error(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# --- rewards


def test_each_branch_has_its_own_reward_or_the_one_for_all(gateway: Gateway) -> None:
    session = gateway.open()
    branches = [choice["turn_id"] for choice in gateway.chat(HI, session, n=3)["choices"]]
    first = gateway.reward(session, 0.25, branch=branches[1], metrics={"correct": 1})
    assert (first["finished"], sorted(first["unrewarded"])) == (False, sorted([branches[0], branches[2]]))
    assert gateway.shown(session)["rewards"] == {branches[1]: 0.25}
    assert gateway.reward(session, -1)["finished"]
    rows = {row["extra"]["branch"]: row for row in gateway.delivered(session)}
    assert {branch: row["reward"] for branch, row in rows.items()} == dict(zip(branches, (-1, 0.25, -1), strict=True))
    assert rows[branches[1]]["metrics"] == {"correct": 1}


def test_the_last_branch_s_reward_finishes_and_finish_leaves_the_others_out(gateway: Gateway) -> None:
    all_of_them, one_of_them = gateway.open(), gateway.open()
    branches = [choice["turn_id"] for choice in gateway.chat(HI, all_of_them, n=2)["choices"]]
    assert [gateway.reward(all_of_them, 1, branch=branch)["finished"] for branch in branches] == [False, True]
    branches = [choice["turn_id"] for choice in gateway.chat(HI, one_of_them, n=2)["choices"]]
    assert gateway.reward(one_of_them, 1, branch=branches[1], finish=True)["unrewarded"] == [branches[0]]
    assert [row["extra"]["branch"] for row in gateway.delivered(one_of_them)] == [branches[1]]
    for session in (all_of_them, one_of_them):
        assert error(gateway.client.get(f"/sessions/{session}")) == (404, "not_found")
        assert error(gateway.post(f"/sessions/{session}/reward", {"reward": 1})) == (404, "not_found")
        body = {"model": MODEL, "messages": HI}
        assert error(gateway.post(f"/sessions/{session}/v1/chat/completions", body)) == (404, "not_found")


def test_what_cannot_be_rewarded_says_why(gateway: Gateway) -> None:
    session = gateway.open()
    path = f"/sessions/{session}/reward"
    assert error(gateway.post(path, {"reward": 1})) == (409, "conflict")  # nothing was sampled
    opening = gateway.chat(HI, session)
    gateway.chat([*HI, opening["choices"][0]["message"], *HI], session)
    inner = opening["choices"][0]["turn_id"]
    assert error(gateway.post(path, {"reward": 1, "branch": inner})) == (409, "conflict")
    assert error(gateway.post(path, {"reward": 1, "branch": "nobody"})) == (404, "not_found")
    for body in ({}, {"reward": "1"}, {"reward": 1, "more": 1}, {"reward": 1, "metrics": {"a": "b"}}):
        assert error(gateway.post(path, body)) == (422, "invalid")
    for number in ("NaN", "Infinity", "1e999"):
        answer = gateway.client.post(
            path, content=f'{{"reward": {number}}}', headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 422
    assert gateway.reward(session, 0)["finished"]


def test_a_session_with_a_request_under_way_is_not_finished(gateway: Gateway) -> None:
    session = gateway.open()
    gateway.chat(HI, session)
    gateway.engine.engine.waits_at = 0
    asking = threading.Thread(target=lambda: gateway.chat([*HI, *HI], session, max_tokens=3))
    try:
        asking.start()
        wait_until(lambda: gateway.engine.engine.running == 1)
        assert error(gateway.post(f"/sessions/{session}/reward", {"reward": 1})) == (409, "conflict")
        assert error(gateway.client.delete(f"/sessions/{session}")) == (409, "conflict")
    finally:
        gateway.engine.engine.waits_at = -1
        asking.join()
    assert gateway.client.delete(f"/sessions/{session}").status_code == 200
    assert error(gateway.client.get(f"/sessions/{session}")) == (404, "not_found")


def test_of_rewards_at_once_one_is_taken(gateway: Gateway) -> None:
    for _ in range(3):
        session, statuses = gateway.open(), list[int]()
        gateway.chat(HI, session)
        path = f"/sessions/{session}/reward"
        posts = [
            threading.Thread(
                target=lambda path=path, statuses=statuses: statuses.append(
                    gateway.post(path, {"reward": 1}).status_code
                )
            )
            for _ in range(8)
        ]
        for thread in posts:
            thread.start()
        for thread in posts:
            thread.join()
        assert statuses.count(200) == 1
        assert set(statuses) <= {200, 404, 409}


# --- groups


def test_sessions_of_a_group_leave_together(gateway: Gateway) -> None:
    unsized = [gateway.open(group="unsized") for _ in range(3)]
    for session in unsized:
        gateway.chat(HI, session)
    sized: list[str] = []
    for reward in (0, 1):  # the second is opened when the first has finished
        assert not any(map(gateway.left_in, [*unsized, *sized]))
        sized.append(gateway.open(group="sized", group_size=2, task_id="t"))
        gateway.chat(HI, sized[-1])
        gateway.reward(sized[-1], reward)
        gateway.reward(unsized[reward], reward)
    assert gateway.client.delete(f"/sessions/{unsized[2]}").status_code == 200  # its group no longer waits for it
    for sessions, name in ((sized, "sized"), (unsized[:2], "unsized")):
        rows = gateway.delivered(sessions[0])
        assert [(row["extra"]["session"], row["reward"]) for row in rows] == list(zip(sessions, (0, 1), strict=True))
        assert {row["extra"]["group"] for row in rows} == {name}
    assert [row["task_id"] for row in gateway.delivered(sized[0])] == ["t", "t"]


def test_a_group_with_a_size_does_not_wait_for_one_that_is_gone(gateway: Gateway) -> None:
    first, second = (gateway.open(group="of two", group_size=2) for _ in range(2))
    gateway.chat(HI, first)
    gateway.reward(first)
    gateway.client.delete(f"/sessions/{second}")
    assert [row["extra"]["session"] for row in gateway.delivered(first)] == [first]


# --- keys


def test_a_key_gives_one_session_and_one_reward(gateway: Gateway) -> None:
    def post(path: str, body: Any, key: str) -> Any:
        return gateway.post(path, body, **{"Idempotency-Key": key})

    opened = [post("/sessions", {"task_id": "a"}, "open") for _ in range(2)]
    assert opened[0].json() == opened[1].json()
    assert error(post("/sessions", {"task_id": "b"}, "open")) == (409, "key_reused")
    session = opened[0].json()["id"]
    gateway.chat(HI, session)
    path = f"/sessions/{session}/reward"
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(post(path, {"reward": 1}, "pay"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.text for answer in answers}) == 1
    assert error(post(path, {"reward": 2}, "pay")) == (409, "key_reused")
    assert len(gateway.delivered(session)) == 1
    assert error(post("/sessions", {}, "k" * 300)) == (422, "invalid")


def test_a_deletion_under_a_key_is_answered_alike_when_it_is_sent_again(gateway: Gateway) -> None:
    session = gateway.open()
    answers = [gateway.client.delete(f"/sessions/{session}", headers={"Idempotency-Key": "gone"}) for _ in range(2)]
    assert [(each.status_code, each.json()) for each in answers] == [(200, {"id": session, "dropped": True})] * 2
    assert error(gateway.client.delete(f"/sessions/{session}")) == (404, "not_found")
    other = gateway.open()
    again = gateway.client.delete(f"/sessions/{other}", headers={"Idempotency-Key": "gone"})
    assert error(again) == (409, "key_reused")


# --- bounds


def test_a_session_that_is_full_says_so(gateway: Gateway) -> None:
    wide, long = gateway.open(), gateway.open()
    path = "/sessions/{}/v1/chat/completions"
    gateway.chat(HI, wide, n=3)
    assert error(gateway.post(path.format(wide), {"model": MODEL, "messages": HI})) == (409, "conflict")
    messages = list(HI)
    for _ in range(6):
        messages += [gateway.say(messages, long), *HI]
    assert error(gateway.post(path.format(long), {"model": MODEL, "messages": messages})) == (409, "conflict")
    body = {"model": MODEL, "messages": messages, "stream": True}
    assert error(gateway.post(path.format(long), body)) == (409, "conflict")


def test_sessions_that_nobody_named_give_way_and_named_ones_do_not(renderer: Renderer, tmp_path: Path) -> None:
    with gateway_serving(Says(renderer, "x"), renderer, tmp_path, bounds=Bounds(sessions=3)) as gateway:
        named = gateway.open()
        automatic = [gateway.chat([{"role": "user", "content": str(i)}])["session_id"] for i in range(4)]
        listed = [each["id"] for each in gateway.client.get("/sessions").json()["sessions"]]
        assert listed == [named, *automatic[2:]]
        gateway.open()
        gateway.open()
        answer = gateway.post("/sessions", {})
        assert (error(answer), answer.headers["Retry-After"]) == ((429, "busy"), "1")
        assert error(gateway.post("/v1/chat/completions", {"model": MODEL, "messages": HI})) == (429, "busy")
        limits = gateway.client.get("/limits").json()
        assert (limits["sessions"], limits["turns"]) == (3, Bounds().turns)


# --- restart


def test_a_restart_keeps_open_sessions_rewards_keys_and_groups_that_were_not_delivered(
    renderer: Renderer, tmp_path: Path
) -> None:
    async def nobody_there(group: Any) -> None:
        raise OSError("nobody there")

    with gateway_serving(Says(renderer, "x"), renderer, tmp_path, deliver=nobody_there) as gateway:
        going_on, judged, finished = (gateway.open(task_id=name) for name in "abc")
        automatic = gateway.chat([{"role": "user", "content": "nobody's"}])
        first = gateway.say(HI, going_on)
        branches = [choice["turn_id"] for choice in gateway.chat(HI, judged, n=2)["choices"]]
        gateway.reward(judged, 0.5, branch=branches[0])
        gateway.chat(HI, finished)
        gateway.post(f"/sessions/{finished}/reward", {"reward": 2}, **{"Idempotency-Key": "pay"})
        log = list(gateway.engine.log)
        shown = gateway.shown(going_on)
        wait_until(lambda: b"tandem_delivery_failures_total 1.0" in gateway.client.get("/metrics").content)
    assert not list(gateway.trajectories.iterdir())
    with gateway_serving(Says(renderer, "y"), renderer, tmp_path) as gateway:
        again = gateway.post(f"/sessions/{finished}/reward", {"reward": 2}, **{"Idempotency-Key": "pay"})
        assert (again.status_code, again.json()["finished"]) == (200, True)
        assert [row["reward"] for row in gateway.delivered(finished)] == [2]
        gateway.engine.log[:] = [log[0], log[1]]  # of what is still open
        assert gateway.shown(going_on)["turns"] == shown["turns"]
        gateway.say([*HI, first, *HI], going_on)
        told = automatic["choices"][0]["message"]
        on = gateway.chat([{"role": "user", "content": "nobody's"}, told, *HI])
        assert on["session_id"] == automatic["session_id"]
        assert gateway.check(going_on, automatic["session_id"]) == [["0-1"], ["0-1"]]
        gateway.reward(judged, 0)
        rows = {row["extra"]["branch"]: row["reward"] for row in gateway.delivered(judged)}
        assert rows == dict(zip(branches, (0.5, 0), strict=True))


# --- the door


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/sessions"), ("GET", "/sessions"), ("GET", "/sessions/x"), ("DELETE", "/sessions/x"),
     ("POST", "/sessions/x/reward"), ("POST", "/generate"), ("POST", "/sessions/x/v1/chat/completions")],
)  # fmt: skip
def test_no_route_answers_a_stranger(gateway: Gateway, method: str, path: str) -> None:
    stranger = gateway.client.request(method, path, headers={"Authorization": "Bearer wrong"})
    assert error(stranger) == (401, "unauthorized")
    page = gateway.client.request(method, path, headers={"Origin": "https://evil.example"})
    assert error(page) == (403, "forbidden")


def test_a_header_that_contradicts_the_path_is_refused(gateway: Gateway) -> None:
    session, other = gateway.open(), gateway.open()
    body = {"model": MODEL, "messages": HI}
    answer = gateway.post(f"/sessions/{session}/v1/chat/completions", body, **{"X-Tandem-Session": other})
    assert error(answer) == (400, "invalid")


def test_metrics_count_sessions(gateway: Gateway) -> None:
    gateway.open()
    text = gateway.client.get("/metrics").text
    numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(numbers["tandem_sessions_open"]) >= 1
    assert float(numbers["tandem_groups_delivered_total"]) >= 1
