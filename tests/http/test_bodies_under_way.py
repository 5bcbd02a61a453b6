"""Bodies of requests under way: what they may take together, unpacked and until they are parsed; and that they come
whole."""

from __future__ import annotations

import asyncio
import gzip
import sys
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from rollouts_served import serving_rollouts

from tandem.rollout.queue.queue import RolloutQueue
from tandem.rollout.queue.types import RegisteredEnvironment, TrainerSpec
from tandem.rollout.wire import codec
from tandem.serve.http.service import Service, body_at_hand, create_app, let_go
from tandem.serve.rollouts.service import rollouts_service
from tandem.types import Trajectory

CAP = 1000  # of one body; of sixteen times that much there is room
HEADERS = {"Authorization": "Bearer t", "Content-Type": "application/json"}


def statuses(path: str, body: bytes, count: int, *, packed: bool) -> Counter[int]:
    """Of so many requests that are under way at once, and of one more once they are answered."""

    async def scenario() -> Counter[int]:
        opened, router = asyncio.Event(), APIRouter()

        async def keeps(request: Request) -> JSONResponse:
            size = len(await request.body())
            await opened.wait()
            return JSONResponse({"size": size})

        async def lets_go(request: Request) -> JSONResponse:
            size = len(await request.body())
            let_go(request)
            await opened.wait()
            return JSONResponse({"size": size, "left": len(await request.body())})

        router.add_api_route("/keeps", keeps, methods=["POST"])
        router.add_api_route("/lets-go", lets_go, methods=["POST"])
        app = create_app(Service("s", router, gzip=True), token="t", hosts=None, body_bytes=CAP)
        headers = HEADERS | ({"Content-Encoding": "gzip"} if packed else {})
        content = gzip.compress(body) if packed else body
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://s", headers=headers) as client:
            tasks = [asyncio.create_task(client.post(path, content=content)) for _ in range(count)]
            await asyncio.sleep(0.3)
            opened.set()
            answers = await asyncio.gather(*tasks)
            assert (await client.post(path, content=content)).status_code == 200  # all of it was given back
        sizes = {(each.json()["size"], each.json().get("left", 0)) for each in answers if each.status_code == 200}
        assert sizes == {(len(body), 0)}
        return Counter(each.status_code for each in answers)

    return asyncio.run(scenario())


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_bodies_are_counted_by_what_they_take_unpacked(packed: bool):
    assert statuses("/keeps", b" " * CAP, 20, packed=packed) == {200: 16, 429: 4}
    assert statuses("/keeps", b" " * 10, 40, packed=packed) == {200: 40}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_body_that_was_parsed_leaves_its_room_to_others(packed: bool):
    assert statuses("/lets-go", b" " * CAP, 40, packed=packed) == {200: 40}


def test_nobody_holds_a_body_that_was_let_go():
    held, router = list[int](), APIRouter()

    async def lets_go(request: Request) -> JSONResponse:
        body = body_at_hand(request)
        assert body == await request.body() == b" " * CAP
        let_go(request)
        held.append(sys.getrefcount(body))
        return JSONResponse({})

    async def pieces() -> AsyncIterator[bytes]:
        yield b" " * (CAP - 1)
        yield b" "

    async def scenario() -> None:
        router.add_api_route("/", lets_go, methods=["POST"])
        transport = httpx.ASGITransport(app=create_app(Service("s", router), token="t", hosts=None, body_bytes=CAP))
        async with httpx.AsyncClient(transport=transport, base_url="http://s", headers=HEADERS) as client:
            assert (await client.post("/", content=pieces())).status_code == 200

    asyncio.run(scenario())
    assert held == [2]  # the name here, and the argument


def test_whoever_waits_for_a_ticket_takes_no_room_with_what_it_asked(tmp_path: Path):
    async def scenario() -> Counter[int]:
        queue = RolloutQueue(tmp_path)
        await queue.registration.register_trainer(TrainerSpec("run", groups_per_step=1))
        await queue.registration.register_environment(RegisteredEnvironment("env"))
        app = create_app(rollouts_service(queue), token="t", hosts=None, body_bytes=CAP)
        asking = b'{"environment": 1, "wait_s": 0.5}'.ljust(CAP)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://s") as client:

            def ask(key: str) -> Coroutine[Any, Any, httpx.Response]:
                return client.post("/v2/tickets", content=asking, headers=HEADERS | {"Idempotency-Key": key})

            answers = await asyncio.gather(*(ask(str(number)) for number in range(40)))
        await queue.close()
        return Counter(each.status_code for each in answers)

    assert asyncio.run(scenario()) == {200: 40}


def test_the_books_name_the_route_of_what_is_called_most(tmp_path: Path):
    with serving_rollouts(tmp_path) as client:
        client.begin()
        assert client.send("/v2/groups", {"groups": []}).status_code == 422
        assert client.http.put("/v2/groups", json={}).status_code == 405
        told = client.http.get("/metrics").text
    assert 'tandem_http_requests_total{method="POST",route="/v2/groups",status="422"} 1.0' in told


def test_a_body_comes_whole_in_whatever_pieces(tmp_path: Path):
    with serving_rollouts(tmp_path) as client:
        client.begin(max_tokens=0)
        one = Trajectory([1] * 400_000, [True] * 400_000, [-1.0] * 400_000, [0] * 400_000)
        frame = bytes(codec.encode([one, one]).frame)  # 7 MB
        pieces = [frame[at : at + 700_001] for at in range(0, len(frame), 700_001)]
        headers = {"Content-Type": codec.BINARY, "Idempotency-Key": "k"}
        answer = client.http.post("/v2/groups?environment=1", content=iter(pieces), headers=headers)
        assert answer.json()["groups"][0]["outcome"] == "queued", answer.text
        assert client.queue is not None
        assert asyncio.run(client.queue.group(1)).frame == frame
