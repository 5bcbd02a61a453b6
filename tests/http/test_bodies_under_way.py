"""How much the bodies of requests under way may take together: unpacked, and until they are parsed."""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter

import httpx
import pytest
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from tandem.serve.app import Service, create_app, let_go

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
