"""The rate limit of a key: what is more gets 429, and the client comes back when it is told to."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from plane import served
from test_client import Running

from tandem.client import requests
from tandem.client.requests import Patience
from tandem.control.rates import RateLimit
from tandem.errors import ControlSilent


def test_a_bucket_fills_at_its_rate_and_holds_four_seconds_of_it():
    now = [100.0]
    limit = RateLimit(2.0, lambda: now[0])
    assert [limit.take("a") for _ in range(9)] == [0.0] * 8 + [0.5]
    assert limit.take("b") == 0.0  # each has its own
    now[0] += 0.25
    assert limit.take("a") == 0.25
    now[0] += 0.25
    assert [limit.take("a"), limit.take("a")] == [0.0, 0.5]
    now[0] += 1000
    assert [limit.take("a") for _ in range(9)] == [0.0] * 8 + [0.5]
    assert RateLimit(0.0).take("a") == 0.0


def test_buckets_of_callers_that_are_gone_are_forgotten():
    now = [0.0]
    limit = RateLimit(1.0, lambda: now[0])
    for number in range(5000):
        limit.take(f"{number}")
        now[0] += 0.01
    assert len(limit._buckets) <= 4097


def test_a_key_that_sends_too_much_is_told_when_to_come_back(tmp_path: Path):
    plane = served(tmp_path, requests_per_s=0.25)
    key, other = plane.key("runs:read"), plane.key("runs:read")
    answers = [plane.ask("GET", "/api/me", key) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 429]
    assert 1 < int(answers[1].headers["retry-after"]) <= 4
    assert "more than 0.25 requests a second" in answers[1].json()["error"]["message"]
    assert plane.ask("GET", "/api/me", other).status_code == 200
    assert {plane.ask("GET", "/api/me").status_code for _ in range(9)} == {200}  # the operator
    documented = plane.ask("GET", "/openapi.json", "").json()["paths"]
    lacking = [path for path, each in documented.items() for one in each.values()
               if ("429" in one["responses"]) is not (one.get("security") != [])]  # fmt: skip
    assert lacking == ["/api/login"]  # open to all, with a limit of its own
    plane.plane.store.close()


def test_the_client_waits_as_long_as_it_is_told(tmp_path: Path):
    running = Running(tmp_path, requests_per_s=0.25)
    try:
        key = running.plane.key("runs:read")
        with running.client(key) as client:
            began = time.monotonic()
            for _ in range(2):  # more would refill the bucket meanwhile, on a slow machine
                client.me()
            assert 3.0 <= time.monotonic() - began < 15.0
        assert running.app.asked.count("GET /api/me") == 3  # one is refused
    finally:
        running.server.should_exit = True
        running.thread.join()


def test_a_wait_is_not_shortened_and_one_beyond_the_patience_is_an_error():
    patience = Patience(60.0, "http://there")
    assert patience.wait_s("status 429", "17") == 17.0
    assert patience.wait_s("status 429") <= 2 * requests._FIRST_WAIT_S * 1.3
    with pytest.raises(ControlSilent, match="status 429"):
        patience.wait_s("status 429", "600")
