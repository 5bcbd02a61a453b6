"""The rollout service over HTTP: its calls, access, idempotency keys, limits and status."""

from __future__ import annotations

import concurrent.futures
import gzip
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from malformed_groups import GOOD_FRAME, good, posted
from rollouts_served import RolloutClient, serving_rollouts
from served import hang_up, wait_until

from stopwatch import Stopwatch
from tandem.rollout.queue.types import Lease
from tandem.rollout.remote import lease_codec
from tandem.rollout.wire import codec
from tandem.serve.rollouts.service import rollouts_service
from tandem.types import Trajectory


@pytest.fixture
def client(tmp_path: Path) -> Iterator[RolloutClient]:
    with serving_rollouts(tmp_path, max_queued=50) as client:
        client.begin()
        yield client


def take(client: RolloutClient, groups: int = 1, **more: Any) -> Lease:
    answer = client.send("/v2/leases", {"epoch": client.epoch, "groups": groups} | more, Accept=codec.BINARY)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == codec.BINARY
    return lease_codec.decode_lease(answer.content)


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_group_comes_out_as_it_went_in_in_either_form(client: RolloutClient):
    trajectory = Trajectory(
        ids=[1, 2, 3, 4], trained=[False, True, False, True], logprobs=[0.0, -0.5, 0.0, -0.25], versions=[-1, 0, -1, 1],
        reward=0.5, status="truncated", metrics={"a": 1.5}, shaping=-0.25, thinking_tokens=2, unclosed=True,
        task_id="t", messages=[{"role": "user", "content": "é"}],
    )  # fmt: skip
    sent = codec.encode([trajectory, trajectory], environment=1, extra={"own": [1, None]})
    client.post("/v2/groups", bytes(sent.frame))
    client.send("/v2/groups", {"groups": [msgspec.to_builtins(codec.to_json(sent.frame))]})
    first, second = take(client, 2).groups
    assert first.frame == second.frame == bytes(sent.frame)
    assert codec.decode(first.frame) == [trajectory, trajectory]
    client.post("/v2/groups", bytes(sent.frame))
    answer = client.post("/v2/leases", {"epoch": client.epoch, "groups": 1})
    told = answer["groups"][0]["group"]
    again = codec.read_json(msgspec.json.encode({"groups": [told]}))
    assert bytes(again[0].frame) == bytes(sent.frame)
    looked = client.get(f"/v2/groups/{answer['groups'][0]['id']}")
    assert looked["group"] == told
    assert answer["groups"][0]["id"] in client.get("/v2/groups?most=1")["groups"]


def test_the_round_of_a_store_over_http(client: RolloutClient):
    tickets = client.post("/v2/tickets", {"environment": 1, "count": 3})["tickets"]
    assert len(tickets) == 3
    client.post("/v2/groups", {"groups": [good() | {"ticket": tickets[1]}]})
    assert client.send("/v2/leases", {"epoch": client.epoch, "groups": 1}).status_code == 204
    client.post(f"/v2/tickets/{tickets[0]}/drop", {"environment": 1, "reason": "no_signal"})
    lease = take(client, version=1)
    assert [(each.order, each.lag) for each in lease.groups] == [(tickets[1], 1)]
    assert client.post(f"/v2/leases/{lease.id}/renew", {"epoch": client.epoch}) == {"seconds": 600.0}
    client.post("/v2/release", {"epoch": client.epoch, "count": 1, "version": 2})
    assert client.post("/v2/ack", {"epoch": client.epoch, "leases": [lease.id]}) == {"groups": 1}
    assert error(client.send(f"/v2/leases/{lease.id}/renew", {"epoch": client.epoch})) == (404, "not_found")
    assert client.post("/v2/environments/1/alive", {}) == {"version": 2}
    client.post("/v2/environments/1/disconnect", {})
    assert error(client.send("/v2/environments/1/alive", {})) == (404, "not_found")
    assert client.get("/v2/status")["dropped"] == {"no_signal": 1, "disconnected": 1}


def test_a_long_poll_answers_when_a_group_comes_and_other_requests_do_not_wait(client: RolloutClient):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(take, client, wait_s=10)
        time.sleep(0.05)
        with Stopwatch() as watch:
            client.get("/v2/status")
        assert watch.seconds < 1
        assert not waiting.done()
        client.post("/v2/groups", {"groups": [good()]})
        assert len(waiting.result(5).groups) == 1


def test_who_hangs_up_while_it_waits_takes_nothing(client: RolloutClient):
    token = client.http.headers["authorization"].removeprefix("Bearer ")
    taking = {"epoch": client.epoch, "groups": 1, "wait_s": 30}
    read = partial(client.get, "/v2/status")  # asked later, so the other was read
    hang_up(client.url, token, "/v2/leases", taking, when=read, **{"Idempotency-Key": "gone"})
    client.post("/v2/groups", {"groups": [good()]})
    assert len(take(client).groups) == 1


WRITES: list[tuple[str, Any, Any]] = [
    ("/v2/trainer", {"run_id": "run", "groups_per_step": 4}, {"max_dropped": 9}),
    ("/v2/trainer/version", {"epoch": 1, "version": 1}, {"version": 2}),
    ("/v2/trainer/leave", {"epoch": 1}, {"epoch": 2}),
    ("/v2/environments", {"name": "more"}, {"name": "other"}),
    ("/v2/environments/1/disconnect", {}, None),
    ("/v2/tickets", {"environment": 1}, {"count": 2}),
    ("/v2/tickets/1/drop", {"environment": 1, "reason": "no_signal"}, {"reason": "other"}),
    ("/v2/groups", {"groups": [good()]}, {"groups": [good(), good()]}),
    ("/v2/leases", {"epoch": 1, "groups": 1}, {"groups": 2}),
    ("/v2/release", {"epoch": 1, "count": 1}, {"count": 2}),
    ("/v2/ack", {"epoch": 1, "leases": [1]}, {"groups": [1]}),
    # Writes that change nothing, and those that say the trainer's version as well.
    ("/v2/trainer/version", {"epoch": 1, "version": 0}, {"version": 2}),
    ("/v2/release", {"epoch": 1, "count": 0}, {"count": 1}),
    ("/v2/ack", {"epoch": 1}, {"groups": [1]}),
    ("/v2/release", {"epoch": 1, "count": 1, "version": 1}, {"version": 2}),
    ("/v2/leases", {"epoch": 1, "groups": 1, "version": 0}, {"version": 1}),
]
"""Route, body, and how the body of another request differs; None where there is one body only."""


def test_every_write_is_listed_here_or_only_says_that_its_caller_lives(client: RolloutClient):
    assert client.queue is not None
    routes = {route.path for route in rollouts_service(client.queue).router.routes if "POST" in route.methods}
    told = {path.replace("/1/", "/{id}/").replace("tickets/{id}", "tickets/{order}") for path, _, _ in WRITES}
    assert routes - told == {"/v2/environments/{id}/alive", "/v2/leases/{id}/renew"}


@pytest.mark.parametrize(("path", "body", "change"), WRITES, ids=[path for path, _, _ in WRITES])
def test_a_write_that_comes_again_is_answered_again_and_done_once(
    client: RolloutClient, path: str, body: Any, change: Any
):
    client.post("/v2/tickets", {"environment": 1})
    client.post("/v2/groups", {"groups": [good()]})
    if path in ("/v2/leases", "/v2/release", "/v2/ack"):
        client.post("/v2/tickets/1/drop", {"environment": 1, "reason": "no_signal"})
    if path in ("/v2/release", "/v2/ack"):
        take(client)
    answers = [client.post(path, body, key="once") for _ in range(2)]
    for answer in answers:
        answer.pop("seconds", None)
    assert answers[0] == answers[1]
    before = client.get("/v2/status")["trainer"]
    if change is not None:
        assert error(client.send(path, body | change, key="once")) == (409, "key_reused")
    assert error(client.send("/v2/environments", {"name": "elsewhere"}, key="once")) == (409, "key_reused")
    assert client.get("/v2/status")["trainer"] == before
    keyless = client.http.post(path, json=body)
    assert (keyless.status_code, keyless.json()["error"]["field"]) == (422, "idempotency-key")


def test_a_key_is_refused_with_another_body_or_on_another_route(client: RolloutClient):
    client.post("/v2/groups", {"groups": [good()]}, key="k")
    assert error(client.send("/v2/groups", {"groups": [good(), good()]}, key="k")) == (409, "key_reused")
    assert error(client.send("/v2/tickets", {"environment": 1}, key="k")) == (409, "key_reused")
    for key in ("", "x" * 129, "a b", "é"):
        answer = client.http.post("/v2/groups", json={}, headers={"Idempotency-Key": key.encode()})
        assert answer.json()["error"]["field"] == "idempotency-key"


def test_ten_posts_at_once_with_one_key_are_one_group(client: RolloutClient):
    body = posted(good())
    headers = {"Content-Type": "application/json", "Idempotency-Key": "same"}
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        answers = list(
            pool.map(lambda _: client.http.post("/v2/groups", content=body, headers=headers).text, range(10))
        )
    assert len(set(answers)) == 1
    assert client.get("/v2/status")["queue"]["queued"] == 1


def test_compressed_bodies_are_taken_and_bounded_before_and_after(tmp_path: Path):
    with serving_rollouts(tmp_path, body_bytes=2_000_000) as client:
        client.begin()
        client.post("/v2/groups", gzip.compress(GOOD_FRAME), **{"Content-Encoding": "gzip"})
        many = GOOD_FRAME * (1_900_000 // len(GOOD_FRAME))
        assert error(client.send("/v2/groups", gzip.compress(many * 2), **{"Content-Encoding": "gzip"}))[0] == 413
        assert error(client.send("/v2/groups", many * 2)) == (413, "too_large")
        assert client.get("/v2/status")["queue"]["queued"] == 1


def test_bodies_under_way_are_bounded_all_together(tmp_path: Path):
    with serving_rollouts(tmp_path, body_bytes=100_000) as client:
        client.begin()
        host, port = client.url.removeprefix("http://").split(":")
        token = client.http.headers["authorization"]
        head = f"POST /v2/groups HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\nContent-Type: {codec.BINARY}\r\n"
        head = head.replace("Host: x", f"Host: {host}") + "Content-Length: 100000\r\n\r\n"
        slow = [socket.create_connection((host, int(port))) for _ in range(24)]
        for each in slow:
            each.sendall(head.encode())
        # Sixteen are let in and wait for their bodies; the rest hear so at once, and then there is no room for another.
        refused = slow[16].recv(100)
        assert refused.startswith(b"HTTP/1.1 429")
        assert client.send("/v2/groups", GOOD_FRAME).status_code == 429
        assert client.get("/v2/status")
        for each in slow:
            each.close()
        wait_until(lambda: client.send("/v2/groups", GOOD_FRAME).status_code == 200)


def test_a_full_queue_is_429_with_a_time_and_a_full_disk_507_and_reads_go_on(client: RolloutClient):
    client.post("/v2/groups", GOOD_FRAME * 50)
    full = client.send("/v2/groups", GOOD_FRAME)
    assert (error(full), full.headers["retry-after"]) == ((429, "busy"), "1")
    assert client.queue is not None
    client.queue.core.segments.reserve_bytes = 2**60
    take(client)
    for _ in range(3):
        refused = client.send("/v2/groups", GOOD_FRAME)
        assert error(refused) == (507, "full")
        assert refused.headers["retry-after"]
    assert len(take(client).groups) == 1
    client.queue.core.segments.reserve_bytes = 0
    client.post("/v2/groups", GOOD_FRAME)


def test_a_trainer_that_was_replaced_is_told_so(client: RolloutClient):
    old = client.epoch
    client.begin()
    assert error(client.send("/v2/leases", {"epoch": old, "groups": 1})) == (409, "fenced")


def test_no_route_answers_a_stranger(client: RolloutClient):
    paths = [("POST", path) for path, _, _ in WRITES]
    for path in ("/v2/status", "/v2/groups", "/v2/groups/1", "/v2/quarantine", "/v2/environments/1", "/limits"):
        paths.append(("GET", path))
    with httpx.Client(base_url=client.url) as stranger:
        for method, path in paths:
            assert error(stranger.request(method, path))[0] == 401, path
            for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
                assert stranger.request(method, path, headers=headers).status_code in (403, 421)


def test_the_limits_are_told_and_admit_what_was_promised(tmp_path: Path):
    with serving_rollouts(tmp_path) as client:
        limits = client.get("/limits")
        assert limits["queued_groups"] >= 10_000
        assert limits["body_bytes"] >= 64 * 2**20
        assert limits["keys_kept_s"] >= 7 * 86400


def test_metrics_and_status_say_what_happened(client: RolloutClient):
    client.post("/v2/groups", GOOD_FRAME * 3)
    client.send("/v2/groups", GOOD_FRAME[:-1])
    take(client, 2, version=1)
    text = client.http.get("/metrics").text
    for line in (
        "tandem_rollouts_queued 1.0",
        "tandem_rollouts_put_total 3.0",
        "tandem_rollouts_taken_total 2.0",
        'tandem_rollouts_dropped_total{reason="refused"} 1.0',
        'tandem_rollouts_lag_bucket{le="1.0"} 2.0',
        'tandem_rollouts_lag_bucket{le="0.0"} 0.0',
        'tandem_rollouts_environment_queued{environment="env_0"} 1.0',
        'tandem_http_requests_total{method="POST",route="/v2/groups",status="422"} 1.0',
    ):
        assert line in text, line
    status = client.get("/v2/status")
    assert status["taken_lag"] == {"1": 2}
    assert status["environments"][0]["taken"] == 2
    assert status["rates"]["put_per_s"] > 0
    assert client.get("/v2/environments/1")["name"] == "env_0"


def test_a_head_without_end_is_cut_off(client: RolloutClient):
    host, port = client.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        with pytest.raises(OSError):  # it hangs up, long before all of it went
            raw.sendall(b"X-Long: " + b"x" * 50 * 2**20)
    assert client.get("/v2/status")


def test_everything_is_there_again_after_a_restart(tmp_path: Path):
    with serving_rollouts(tmp_path) as client:
        client.begin()
        client.post("/v2/groups", GOOD_FRAME * 2, key="put")
        lease = take(client)
    with serving_rollouts(tmp_path) as again:
        again.epoch = client.epoch
        assert len(again.post("/v2/groups", GOOD_FRAME * 2, key="put")["groups"]) == 2
        assert again.get("/v2/status")["queue"]["queued"] == 1
        assert again.post("/v2/ack", {"epoch": again.epoch, "leases": [lease.id]}) == {"groups": 1}


def test_a_client_that_sends_slowly_delays_nobody(client: RolloutClient):
    host, port = client.url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(100)]
    for each in slow:
        each.sendall(b"POST /v2/groups HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le")
    longest = 0.0
    for _ in range(20):
        with Stopwatch() as watch:
            client.get("/v2/status")
        longest = max(longest, watch.seconds)
    for each in slow:
        each.close()
    assert longest < 0.25


def test_what_does_not_fit_the_state_names_its_field_too(client: RolloutClient):
    old, group = client.epoch, codec.decode(GOOD_FRAME)
    frame, strange = (
        bytes(codec.encode(group, **head).frame) for head in ({"environment": 1, "ticket": 77}, {"environment": 9})
    )
    asked: list[tuple[str, Any, int, str]] = [
        ("trainer", {"run_id": "another", "groups_per_step": 4}, 409, "run_id"),
        ("environments", {"name": "e", "min_share": 0.7}, 200, ""),
        ("environments", {"name": "e", "min_share": 0.7}, 409, "min_share"),
        ("tickets", {"environment": 9}, 404, "environment"),
        ("groups", frame, 409, "groups.0.ticket"),
        ("groups", strange, 404, "groups.0.environment"),
        ("tickets/77/drop", {"environment": 1, "reason": "dull"}, 409, "ticket"),
        ("release", {"epoch": old, "count": 5}, 409, "count"),
        ("trainer/version", {"epoch": old, "version": 3}, 200, ""),
        ("trainer/version", {"epoch": old, "version": 2}, 409, "version"),
        ("leases", {"epoch": old + 1, "groups": 1}, 409, "epoch"),
    ]
    for path, body, status, field in asked:
        answer = client.send(f"/v2/{path}", body)
        assert (answer.status_code, answer.json().get("error", {}).get("field", "")) == (status, field), path
    client.post("/v2/release", {"epoch": old, "count": 0}, key="k")
    assert client.send("/v2/ack", {"epoch": old}, key="k").json()["error"]["field"] == "idempotency-key"


def test_an_acknowledgement_that_comes_too_late_is_not_taken_for_one(client: RolloutClient):
    client.post("/v2/groups", GOOD_FRAME)
    lease = take(client).id
    client.begin()  # as after a kill: what was leased is queued again
    body = {"epoch": client.epoch, "leases": [lease]}
    answer = client.send("/v2/ack", body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (404, "leases")
    again = take(client).id
    for _ in range(2):
        assert client.send("/v2/ack", body | {"leases": [again]}, key="same").json() == {"groups": 1}
    assert client.post("/v2/ack", body | {"leases": [again]}) == {"groups": 0}


@pytest.mark.parametrize("path", ["trainer", "environments"])
def test_a_registration_that_cannot_be_kept_moves_nobody(client: RolloutClient, path: str):
    deep: Any = {}
    for _ in range(600):
        deep = {"a": deep}
    for extra in (deep, {"a": 2**70}):
        body = {"extra": extra} | ({"run_id": "run", "groups_per_step": 4} if path == "trainer" else {"name": "b"})
        answer = client.send(f"/v2/{path}", body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, "extra"), answer.text
    client.post("/v2/trainer/version", {"epoch": client.epoch, "version": 0})
