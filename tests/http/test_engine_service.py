"""The engine's server: who may change weights, what a pause is worth, and that torn weights are never answered with."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_served import CONTEXT, LINK, EngineServed, FakeEngine, engine_serving
from served import wait_until

from stopwatch import Stopwatch
from tandem.engine.server import connection as connections
from tandem.engine.server.connection import Connection
from tandem.errors import EngineError, EngineLost, LogprobGap, SyncError, SyncTimeout
from tandem.io.engine_messages import error_of
from tandem.io.process_identity import identity
from tandem.serve.engine import service
from tandem.types import Completion, Sampling

POSTS = ("generate", "attach", "load", "sleep", "wake", "digest")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def served(engine: FakeEngine, renderer: Any, tmp_path: Path) -> Iterator[EngineServed]:
    with engine_serving(engine, renderer, tmp_path) as served:
        yield served
    assert engine.closed
    assert all(end.closed for end in served.ends)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]


PROMPT = {"prompt_ids": [1, 2], "sampling": {"max_tokens": 20}}
LONG = {"prompt_ids": [1, 2], "sampling": {"max_tokens": 200}}

# --- the door, and what comes through it


def test_nobody_comes_in_without_the_token_the_name_and_the_type(served: EngineServed) -> None:
    for name in POSTS:
        assert httpx.post(f"{served.url}/engine/{name}", json={}).status_code == 401
        assert served.post(name, {}, Host="evil.example").status_code == 421
        assert served.post(name, {}, Origin="http://evil.example").status_code == 403
        with served.http() as client:
            assert client.post(f"/engine/{name}", content=b"{}").status_code == 415
            assert client.get(f"/engine/{name}").status_code == 405
            big = client.post(f"/engine/{name}", json={"prompt_ids": [1] * 2**20})
            assert big.status_code == 413
    assert httpx.get(f"{served.url}/engine/status").status_code == 401
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}


GARBAGE: list[Any] = [
    b"", b"{", b"null", b"[]", b'"x"', b"1", b"{}", b'{"a":1}', b"\xff\xfe", b"[" * 5000, b'{"prompt_ids":[NaN]}',
    *({"prompt_ids": ids, "sampling": {"max_tokens": 4}} for ids in (
        [], [-1], [10**30], [300], ["1"], [1.5], [True], [[1]], None, "1", [1] * 400,
    )),
    *({"prompt_ids": [1], "sampling": {"max_tokens": 4} | sampling} for sampling in (
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 10**20}, {"max_tokens": CONTEXT}, {"temperature": -1},
        {"temperature": 10**400}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"stop": "x"}, {"stop": [""]},
        {"stop": ["x"] * 100}, {"stop_ids": [-1]}, {"stop_ids": [9999]}, {"seed": 2**70}, {"seed": "1"}, {"odd": 1},
        {"images": [{"digest": "../../etc/passwd", "offset": 0, "grid": [1, 2, 2], "length": 1}]},
        {"images": [{"digest": "ab" * 32, "offset": 0, "grid": [1, 2, 2], "length": 1}]},  # this engine sees none
    )),
    *({"prompt_ids": [1], "sampling": {"max_tokens": 4}} | more for more in (
        {"sampling": []}, {"session": 5}, {"session": "x" * 300}, {"boot_id": "b" * 200}, {"odd": 1},
    )),
    {"link": {}}, {"link": []}, {"link": {"mode": "disk"}, "lease_s": 0}, {"link": {"mode": None}},
    {"link": {"mode": "disk"}, "lease_s": 1e9}, {"link": {"mode": ["disk"]}}, {"link": {"mode": {}}},
    {"version": 1, "attachment": 0, "boot_id": "boot-a"}, {"version": 1, "attachment": 99, "boot_id": "boot-a"},
    {"version": -1, "attachment": 1, "boot_id": "boot-a"}, {"version": 1, "attachment": 1, "boot_id": 7},
    {"version": 1, "attachment": 1, "boot_id": "b" * 200}, {"attachment": 1, "boot_id": "boot-a", "lease_s": -1},
    {"version": 1, "attachment": 1, "boot_id": "boot-a", "deadline_s": 1e30}, {"version": 2**60},
    {"attachment": "1", "boot_id": "boot-a"}, {"version": 77}, {"version": True},
]  # fmt: skip


def test_a_body_that_is_wrong_is_the_client_s_fault(served: EngineServed) -> None:
    with served.http() as client:
        for name in POSTS:
            for body in GARBAGE:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                headers = {"Content-Type": "application/json"}
                answer = client.post(f"/engine/{name}", content=content, headers=headers)
                assert 400 <= answer.status_code < 500, (name, body, answer.text)
                assert answer.json()["error"]["message"]
    assert served.status()["state"] == "serving"
    assert served.engine.made == 0


def test_a_completion_comes_as_lines_that_add_up(served: EngineServed) -> None:
    served.engine.pause_s = 0.005
    answer = served.post("generate", PROMPT)
    *tokens, end = lines(answer)
    assert answer.status_code == 200
    assert [token for line in tokens for token in line["ids"]] == list(range(1, 21))
    assert {line["version"] for line in tokens} == {3}
    assert len(tokens) > 1
    assert end == {"finish_reason": "length", "spans": [[3, 20]]}


def test_a_client_that_may_be_told_late_gets_one_line_and_nothing_late_at_the_end(served: EngineServed) -> None:
    served.engine.pause_s = 0.005
    with Stopwatch() as watch:
        answer = served.post("generate", {**PROMPT, "sampling": {"max_tokens": 20, "told_within_s": 30.0}})
    tokens, end = lines(answer)
    assert tokens["ids"] == list(range(1, 21))
    assert end == {"finish_reason": "length", "spans": [[3, 20]]}
    assert watch.seconds < 10
    with Stopwatch() as watch:
        often = served.post("generate", {**LONG, "sampling": {"max_tokens": 200, "told_within_s": 0.1}})
    assert 3 <= len(lines(often)) <= 3 + watch.wall_s / 0.1  # 200 tokens take a second or more


def made_when_told(served: EngineServed, sampling: Sampling) -> tuple[Completion, list[int]]:
    """A completion as a trainer asks for it, and how many tokens the engine had made as each was told."""
    served.engine.pause_s, made = 0.005, list[int]()

    async def ask() -> Completion:
        connection = Connection(served.url, served.token)
        try:
            await connection.open()
            return await connection.complete([1, 2], sampling, None, lambda *_: made.append(served.engine.made))
        finally:
            await connection.close()

    return asyncio.run(ask()), made


@pytest.mark.parametrize("late", [True, False])
def test_a_caller_that_may_be_told_late_is_told_of_all_tokens_at_the_end(served: EngineServed, late: bool) -> None:
    completion, made = made_when_told(served, Sampling(max_tokens=100, told_within_s=30.0 if late else 0.0))
    assert (completion.ids, completion.versions) == (list(range(1, 101)), [3] * 100)
    assert len(made) == 100
    assert (made == [100] * 100) is late


def test_a_server_that_cannot_tell_late_is_not_asked_to(served: EngineServed, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an earlier checkout refuses the field, and says nothing of it in its status."""
    monkeypatch.setattr(service, "_LATEST_S", 0.0)
    _, made = made_when_told(served, Sampling(max_tokens=100, told_within_s=30.0))
    assert min(made) < 100


def test_every_field_of_sampling_is_sent_or_refused() -> None:
    by_hand = {"on_update", "shape", "top_logprobs", "images", "told_within_s"}
    assert {each.name for each in fields(Sampling)} == {*connections.SENT, *by_hand}


def test_a_client_that_hangs_up_ends_its_request(served: EngineServed) -> None:
    served.engine.pause_s = 0.01
    with served.http() as client, client.stream("POST", "/engine/generate", json=LONG) as answer:
        pieces = answer.iter_lines()
        next(pieces)
        assert served.engine.running == 1
    wait_until(lambda: served.engine.running == 0)
    assert served.engine.cancelled == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SyncError("a"), 409), (SyncTimeout("b"), 409), (EngineError("c"), 503), (EngineLost("d"), 503),
        (LogprobGap("e"), 503),
    ],
)  # fmt: skip
def test_an_error_keeps_its_class_across_the_wire(served: EngineServed, error: Exception, status: int) -> None:
    caller = served.attach()
    served.engine.fails = error
    answer = served.post("load", {"version": 4} | caller)
    told = error_of(answer.json(), "")
    assert (answer.status_code, type(told), str(told)) == (status, type(error), str(error))
    served.engine.refuses = error
    told = error_of(served.post("generate", PROMPT).json(), "")
    assert (type(told), str(told)) == (type(error), str(error))


def test_what_we_did_not_foresee_is_not_told(served: EngineServed) -> None:
    caller = served.attach()
    served.engine.fails = RuntimeError("a secret")
    answer = served.post("load", {"version": 4} | caller)
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_users_ask_the_same_engine(served: EngineServed) -> None:
    with served.http() as client:
        body = {"model": "test/tiny", "prompt": [1, 2], "max_tokens": 3, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["token_ids"] == [1, 2, 3]
        assert "tandem_http_requests" in client.get("/metrics").text
        assert client.get("/limits").json()["generations_at_a_time"] > 1000


def test_an_engine_without_weights_says_so(served: EngineServed) -> None:
    served.engine.version = -1
    assert served.status()["state"] == "empty"
    answer = served.post("generate", PROMPT)
    assert answer.status_code == 503
    assert "no weights yet" in answer.text


def test_health_says_when_the_engine_died(served: EngineServed) -> None:
    assert httpx.get(f"{served.url}/health").status_code == 200
    served.soon(served.engine.died.set)
    wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503)
    assert served.status()["state"] == "dead"


# --- attachments


def test_attaching_tells_the_layout_and_loading_the_fingerprints(served: EngineServed) -> None:
    answer = served.post("attach", {"link": LINK}).json()
    assert answer == {
        "boot_id": "boot-a", "workers": 1, "layout": {"w": ["float32", [2, 2]]}, "handles": {"w": {"offset": 0}},
        "attachment": 1,
    }  # fmt: skip
    told = served.post("load", {"version": 4, "attachment": 1, "boot_id": "boot-a"}).json()
    assert told == {
        "version": 4, "fingerprints": {"w": "00ff"}, "engines": ["boot-a"], "cache_epoch": 6, "seconds": {"wait": 0.25},
        "read_back": True, "lent_bytes": 0,
    }  # fmt: skip
    assert served.post("digest", {"version": 4}).json()["fingerprints"] == {"w": "00ff"}
    assert code(served.post("digest", {"version": 3})) == (409, "sync")
    status = served.status()
    assert (status["version"], status["state"], status["attachment"]) == (4, "serving", 1)
    assert status["mapping"] == {"mode": "disk", "carries": "full", "tensors": 1}


def test_a_trainer_that_was_replaced_may_not_write(served: EngineServed) -> None:
    zombie, heir = served.attach(), served.attach()
    assert served.ends[0].closed
    for name, more in (("load", {"version": 9}), ("sleep", {}), ("wake", {})):
        assert code(served.post(name, zombie | more)) == (409, "fenced")
    assert served.status()["version"] == 3
    assert served.post("load", {"version": 4} | heir).status_code == 200


def test_a_trainer_that_was_replaced_does_not_come_back_and_one_that_was_not_may(served: EngineServed) -> None:
    served.attach(owner="first")
    again = served.attach(owner="first")  # its own answer got lost, say
    assert served.post("load", {"version": 4} | again).status_code == 200
    heir = served.attach(owner="heir")
    assert code(served.post("attach", {"link": LINK, "owner": "first"})) == (409, "fenced")
    assert served.post("load", {"version": 5} | heir).status_code == 200


def test_a_load_under_way_ends_when_another_trainer_attaches(served: EngineServed) -> None:
    zombie = served.attach()
    served.engine.arrived.clear()
    waiting = served.in_background("load", {"version": 9, "deadline_s": 60} | zombie)
    wait_until(lambda: served.engine.loads)
    with Stopwatch() as watch:
        heir = served.attach()
        assert code(waiting.wait()) == (409, "fenced")
    assert watch.seconds < 2
    served.soon(served.engine.arrived.set)
    assert served.post("load", {"version": 4} | heir).json()["version"] == 4


def test_another_life_of_the_engine_is_not_the_one_that_was_attached(served: EngineServed) -> None:
    caller = served.attach()
    for name, more in (("load", {"version": 9}), ("sleep", {}), ("wake", {})):
        assert code(served.post(name, caller | more | {"boot_id": "boot-b"})) == (409, "engine_lost")


def test_who_cannot_be_reached_does_not_take_the_place_of_who_can(renderer: Any, tmp_path: Path) -> None:
    def open_or_not(link: Any) -> Any:
        if link.get("deadline_s") == 1.0:
            raise ConnectionRefusedError("nobody listens")
        if link.get("deadline_s") == 2.0:
            raise KeyError("host")
        from engine_served import FakeEnd

        return FakeEnd(link)

    with engine_serving(FakeEngine(), renderer, tmp_path, open_source=open_or_not) as served:
        caller = served.attach()
        assert code(served.post("attach", {"link": LINK | {"deadline_s": 1.0}})) == (409, "sync")
        assert code(served.post("attach", {"link": LINK | {"deadline_s": 2.0}})) == (422, "invalid")
        assert served.post("load", {"version": 4} | caller).status_code == 200


def test_a_load_has_a_deadline_and_the_version_before_goes_on(served: EngineServed) -> None:
    caller = served.attach()
    served.engine.arrived.clear()
    assert code(served.post("load", {"version": 4, "deadline_s": 0.2} | caller)) == (409, "sync_timeout")
    assert served.status() | {"version": 3, "state": "serving"} == served.status()


def test_a_trainer_that_hangs_up_ends_its_load(served: EngineServed) -> None:
    caller = served.attach()
    served.engine.arrived.clear()
    served.hang_up("load", {"version": 4} | caller, when=lambda: served.engine.loads)
    with Stopwatch() as watch:
        assert served.post("sleep", caller).status_code == 200, "whoever waits for its turn gets it"
    assert watch.seconds < 2


# --- pauses


def test_a_pause_ends_with_its_lease_and_renewing_makes_it_longer(served: EngineServed) -> None:
    caller = served.attach()
    for _ in range(4):
        assert served.post("sleep", {"lease_s": 40} | caller).status_code == 200
        served.later(20)
    assert served.status()["state"] == "paused"
    assert 0 < served.status()["lease_left_s"] <= 20
    served.later(20)
    wait_until(lambda: served.status()["state"] == "serving")
    assert served.engine.awake.is_set()
    assert served.post("wake", caller).status_code == 200, "who only computed meanwhile has done no harm"


def test_a_clock_that_is_set_moves_no_lease(served: EngineServed, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = served.attach()
    served.post("sleep", {"lease_s": 40} | caller)
    now = time.time
    for set_by_s in (7200, -7200):
        monkeypatch.setattr(time, "time", lambda set_by_s=set_by_s: now() + set_by_s)
        served.later(10)
        assert served.status()["state"] == "paused"
        assert 0 < served.status()["lease_left_s"] <= 30
    served.later(20)
    wait_until(lambda: served.status()["state"] == "serving")


def test_a_request_waits_for_the_end_of_a_pause(served: EngineServed) -> None:
    caller = served.attach()
    served.post("sleep", {"lease_s": 30} | caller)
    waiting = served.in_background("generate", PROMPT)
    wait_until(lambda: served.status()["running"] == 1)
    assert served.engine.made == 0
    assert served.post("wake", caller).status_code == 200
    assert lines(waiting.wait())[-1]["spans"] == [[3, 20]]


def test_a_trainer_that_dies_before_it_writes_leaves_the_version_before(served: EngineServed) -> None:
    caller = served.attach()
    served.post("sleep", {"lease_s": 30, "writing": True} | caller)
    assert served.engine.remembered == 1
    served.later(30)
    wait_until(lambda: served.status()["state"] == "serving")
    assert served.engine.awake.is_set()
    assert code(served.post("load", {"version": 4} | caller)) == (409, "engine_lost"), "it might write at any moment"
    assert served.post("load", {"version": 4} | served.attach()).status_code == 200


def torn(served: EngineServed) -> None:
    """Somebody wrote half of a version, and never came back."""
    served.post("sleep", {"lease_s": 30, "writing": True} | served.attach())
    served.engine.whole = False
    served.later(30)
    wait_until(lambda: served.status()["state"] == "torn")


def test_torn_weights_answer_503_until_a_version_was_loaded(served: EngineServed) -> None:
    torn(served)
    answer = served.post("generate", PROMPT)
    assert code(answer) == (503, "engine_lost")
    assert "interrupted" in answer.text
    with served.http() as client:
        body = {"model": "test/tiny", "prompt": [1, 2], "max_tokens": 3}
        assert client.post("/v1/completions", json=body).status_code == 503
        assert client.get("/health").status_code == 503
    assert served.engine.made == 0
    caller = served.attach(writing=True)
    served.engine.whole = True  # what is remembered of torn weights says nothing
    assert served.status()["state"] == "torn"
    assert code(served.post("wake", caller)) == (409, "sync")
    assert served.post("generate", PROMPT).status_code == 503
    assert served.post("load", {"version": 4} | caller).status_code == 200
    assert served.status()["state"] == "serving"
    assert lines(served.post("generate", PROMPT))[-1]["spans"] == [[4, 20]]
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_requests_under_way_end_when_their_weights_are_torn(served: EngineServed) -> None:
    served.engine.pause_s = 0.01
    under_way = [served.in_background("generate", LONG) for _ in range(3)]
    wait_until(lambda: served.engine.made > 10)
    torn(served)
    made = served.engine.made
    for each in under_way:
        assert lines(each.wait())[-1]["error"]["code"] == "engine_lost"
    assert served.engine.running == 0
    assert served.engine.made == made


@pytest.mark.parametrize("how", ["an error", "the deadline", "hanging up"])
def test_a_failed_load_after_a_write_never_lets_the_torn_weights_speak(served: EngineServed, how: str) -> None:
    caller = served.attach(writing=True, lease_s=30)
    waiting = served.in_background("generate", PROMPT)
    wait_until(lambda: served.status()["running"] == 1)
    served.engine.whole = False
    load = {"version": 4, "deadline_s": 0.3 if how == "the deadline" else 30} | caller
    if how == "an error":
        served.engine.fails = SyncError("not what was sent")
        assert code(served.post("load", load)) == (409, "sync")
    else:
        served.engine.arrived.clear()
        if how == "the deadline":
            assert code(served.post("load", load)) == (409, "sync_timeout")
        else:
            served.hang_up("load", load, when=lambda: served.engine.loads)
    wait_until(lambda: served.status()["state"] == "torn")
    assert code(waiting.wait()) == (503, "engine_lost")
    assert served.engine.made == 0


def test_a_failed_load_before_a_write_goes_on_with_the_version_before(served: EngineServed) -> None:
    caller = served.attach(writing=True)
    served.engine.fails = SyncError("nobody came")
    assert code(served.post("load", {"version": 4} | caller)) == (409, "sync")
    assert lines(served.post("generate", PROMPT))[-1]["spans"] == [[3, 20]]


def test_waking_after_a_write_is_refused(served: EngineServed) -> None:
    caller = served.attach(writing=True)
    served.engine.whole = False
    assert code(served.post("wake", caller)) == (409, "sync")
    assert served.status()["state"] == "torn"


# --- a trainer that was stopped, not dead, and is let go on after its pause has run out


def given_up(served: EngineServed) -> None:
    served.post("sleep", {"lease_s": 30, "writing": True} | served.attach())
    served.later(30)
    wait_until(lambda: served.status()["state"] == "serving")


def test_an_answer_that_a_late_write_may_have_reached_is_none(served: EngineServed) -> None:
    given_up(served)
    assert lines(served.post("generate", PROMPT))[-1]["spans"] == [[3, 20]], "it has not written so far"
    served.engine.torn_at = served.engine.made + 5
    told = lines(served.post("generate", PROMPT))
    assert [list(each) for each in told] == [["error"]], "not a token of it, either"
    assert told[0]["error"]["code"] == "engine_lost"
    assert served.status()["state"] == "torn"
    assert code(served.post("generate", PROMPT)) == (503, "engine_lost")


def test_its_heir_finds_out_before_anything_is_answered(served: EngineServed) -> None:
    given_up(served)
    served.engine.whole = False
    caller = served.attach()
    assert served.status()["state"] == "torn"
    assert served.post("generate", PROMPT).status_code == 503
    assert served.post("load", {"version": 4} | caller).status_code == 200
    assert lines(served.post("generate", PROMPT))[-1]["spans"] == [[4, 20]]


@pytest.mark.parametrize("stays", [False, True])
def test_memory_that_cannot_move_is_not_lent_again_while_who_had_it_is_there(served: EngineServed, stays: bool) -> None:
    served.engine.stays = stays
    with subprocess.Popen(["sleep", "60"]) as stopped:
        try:
            stopped.send_signal(signal.SIGSTOP)
            first = identity(stopped.pid)
            served.attach(writing=True, lease_s=30, owner="first", process=first)
            served.later(30)
            assert served.post("attach", {"link": LINK, "owner": "first", "process": first}).status_code == 200
            answer = served.post("attach", {"link": LINK, "owner": "heir", "process": identity()})
            assert answer.status_code == (409 if stays else 200), answer.text
            assert not stays or f"process {stopped.pid} of an earlier trainer still runs" in answer.text
        finally:
            stopped.kill()
    assert served.post("attach", {"link": LINK, "owner": "heir", "process": identity()}).status_code == 200


# --- what a link may be, and reach for


_HEX = "0123456789abcdef" * 2
_GROUP = {
    "host": "127.0.0.1", "port": 29500, "token": _HEX, "generation": 1, "world_size": 2, "device": "cpu",
    "deadline_s": 1.0,
}  # fmt: skip
LINKS_OF: dict[str, dict[str, Any]] = {
    "shared": {"mode": "shared", "meeting": _HEX, "deadline_s": 1.0},
    **{mode: {"mode": mode, **_GROUP} for mode in ("broadcast", "adapter_broadcast")},
    **{mode: {"mode": mode, "directory": "ROOT", "deadline_s": 1.0} for mode in ("disk", "adapter", "restart")},
}
WRONG: dict[str, list[Any]] = {
    "deadline_s": [None, "1", True, 0, -1, -1e300, 1e300, 10**400, [], {}],
    "rank": [None, "0", -1, 0.5, 2**40, True],
    "meeting": [None, 5, "", "a1b2", _HEX.upper(), f"{_HEX}0", f"{_HEX}\n", [_HEX], "ü" * 32],
    "token": [None, 5, "", "a1b2", f"{_HEX}/x", [_HEX]],
    "directory": [None, 5, "", ["ROOT"], "x" * 5000],
    "host": [None, 5, [], "x" * 300],
    "port": [None, "29500", 0, -1, 2**16, 1.5],
    "generation": [None, 0, -1, "1", 2**40],
    "world_size": [None, 0, 1, -1, 1e9, 2**40],
    "device": [None, 0, "", "meta", "cuda:0"],
    "odd": [1],
}


@pytest.mark.parametrize("mode", LINKS_OF)
def test_a_link_that_is_wrong_is_refused_with_its_field_and_who_is_attached_goes_on(
    served: EngineServed, tmp_path: Path, mode: str
) -> None:
    caller = served.attach()
    before = served.status()
    right = json.loads(json.dumps(LINKS_OF[mode]).replace("ROOT", str(tmp_path)))
    wrong = [(key, right | {key: value}) for key in WRONG if key in {*right, "rank", "odd"} for value in WRONG[key]]
    wrong += [(key, {name: right[name] for name in right if name != key}) for key in right]
    for key, link in wrong:
        answer = served.post("attach", {"link": link, "owner": "heir"})
        assert answer.status_code == 422, (link, answer.text)
        assert answer.json()["error"]["field"] == f"link.{key}", answer.text
    assert served.status() == before
    assert len(served.ends) == 1
    assert served.post("load", {"version": 4} | caller).status_code == 200
    assert served.post("attach", {"link": right | {"rank": 1}}).status_code == 200


def test_a_number_that_is_none_is_refused_before_the_link_is_read(served: EngineServed) -> None:
    caller = served.attach()
    for number in ("NaN", "Infinity", "-Infinity", "1e400"):
        body = json.dumps({"link": LINK}).replace("5.0", number).encode()
        answer = served.client.post("/engine/attach", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422, answer.text
    assert served.post("load", {"version": 4} | caller).status_code == 200


def refused(link: dict[str, Any]) -> dict[str, Any]:
    return LINKS_OF["broadcast"] | link


LINKS: list[dict[str, Any]] = [
    {"mode": "pickle"}, {"mode": "inproc"}, {"mode": ""}, {"mode": 1}, {},
    *(refused({"host": value}) for value in (
        "169.254.169.254", "10.0.0.1", "127.1", "0x7f.1", "2130706433", "0.0.0.0", "evil.example", "localhost.evil",
        "metadata", "[::ffff:10.0.0.1]", "::ffff:10.0.0.1", "127.0.0.1@evil.example", "127.0.0.1 evil", "127.0.0.1\x00",
    )),
    refused({"hosts": ["127.0.0.1", "10.0.0.1"]}), refused({"deep": {"er": {"host": "10.0.0.1"}}}),
    *(LINKS_OF[mode] | {"directory": value} for mode in ("disk", "adapter", "restart") for value in (
        "/etc", "/proc/self/fd", "relative", "../x", "ROOT/../..", "ROOT/link", "/", "\x00", "ROOT\x00/x", "~", "",
    )),
    *(refused({key: value}) for key in ("name", "init_method", "callback") for value in (
        "tcp://10.0.0.1:1", "file:///etc/passwd", "http://169.254.169.254/latest", "/etc/passwd", "a/../../etc",
        "\\\\evil\\share",
    )),
]  # fmt: skip


def test_a_link_reaches_nothing_that_the_server_was_not_started_with(served: EngineServed, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    for link in LINKS:
        there = json.loads(json.dumps(link).replace("ROOT", str(tmp_path)))
        answer = served.post("attach", {"link": there})
        assert answer.status_code in (403, 422), (link, answer.text)
    assert served.ends == []
    assert served.status()["attachment"] == 0


def test_a_link_may_name_this_machine_and_what_lies_under_the_roots(served: EngineServed, tmp_path: Path) -> None:
    for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        assert served.post("attach", {"link": refused({"host": host})}).status_code == 200
    (tmp_path / "versions").mkdir()
    for path in (str(tmp_path), str(tmp_path / "versions" / "1")):
        assert served.post("attach", {"link": LINK | {"directory": path}}).status_code == 200
    assert served.status()["attachment"] == 6
