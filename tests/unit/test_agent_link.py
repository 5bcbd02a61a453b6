"""What an agent concludes from the answers to its requests."""

from __future__ import annotations

import httpx
import pytest

from tandem.agent.link import Link
from tandem.errors import Fenced, RunError
from tandem.shapes.agent import AppendBody, Appended

BODY = AppendBody(instance="me")
OURS = {"error": {"code": "fenced", "message": "the attempt was closed"}}


def asked(status: int, **more: object) -> Appended | None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, **more)  # type: ignore[arg-type]

    link = Link("http://control/api/attempts/a/", "secret", transport=httpx.MockTransport(answer))
    try:
        return link.ask("append", BODY, Appended)
    finally:
        link.close()
        assert str(seen[0].url) == "http://control/api/attempts/a/append"
        assert seen[0].headers["authorization"] == "Bearer secret"


def test_an_answer_is_read() -> None:
    told = asked(200, json={"want": "stop", "lease_s": 60, "streams": {}, "of_a_newer_release": 1})
    assert told is not None
    assert told.want == "stop"


@pytest.mark.parametrize("status", [401, 403, 404, 409])
def test_a_closed_attempt_is_told_from_the_page_of_a_proxy(status: int) -> None:
    with pytest.raises(Fenced):
        asked(status, json=OURS)
    assert asked(status, text="<html>nginx</html>") is None


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_a_server_in_trouble_is_asked_again(status: int) -> None:
    assert asked(status, json=OURS) is None


def test_a_page_in_place_of_an_answer_is_none() -> None:
    assert asked(200, text="<html>welcome</html>") is None


@pytest.mark.parametrize("status", [400, 413, 422, 507])
def test_a_body_that_is_refused_is_no_reason_to_end_the_trainer(status: int) -> None:
    with pytest.raises(RunError, match="refuses this append"):
        asked(status, json=OURS)


def test_a_server_that_is_away_is_asked_again() -> None:
    link = Link("http://127.0.0.1:1/api/attempts/a", "secret")
    assert link.ask("append", BODY, Appended) is None
    link.close()
