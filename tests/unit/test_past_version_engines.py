"""Engines of earlier versions: two at a time, and none ends while it answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.serve.http.refusals import RequestRefused
from tandem.serve.online import past_versions
from tandem.serve.online.past_versions import PastVersions
from tandem.types import Completion, Sampling


class Slow:
    def __init__(self, version: int) -> None:
        self.version, self.go, self.closed = version, asyncio.Event(), False

    async def generate(self, prompt_ids: Any, sampling: Any, **_: Any) -> Completion:
        await self.go.wait()
        assert not self.closed
        return Completion([1], [0.0], [], "stop")

    async def close(self) -> None:
        self.closed = True


def test_who_is_answered_is_not_cut_off_by_who_asks_for_a_third_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(past_versions, "JUST_ASKED_S", 0.0)
    made: dict[int, Slow] = {}

    def load(version: int) -> Slow:
        made[version] = Slow(version)
        return made[version]

    async def run() -> None:
        past = PastVersions(load)
        running = [
            asyncio.create_task((await past.engine(version)).generate([1], Sampling(max_tokens=1)))
            for version in (1, 2)
        ]
        await asyncio.sleep(0)
        third = asyncio.create_task(past.engine(3))
        await asyncio.sleep(0.1)
        assert not third.done()
        assert (await asyncio.wait_for(past.engine(1), 1)).version == 1, "one that is here is not waited for"
        made[2].go.set()
        assert (await asyncio.wait_for(third, 5)).version == 3
        assert [each.closed for each in made.values()] == [False, True, False]
        busy = asyncio.create_task((await past.engine(3)).generate([1], Sampling(max_tokens=1)))
        await asyncio.sleep(0)
        monkeypatch.setattr(past_versions, "PATIENCE_S", 0.05)
        with pytest.raises(RequestRefused, match="versions 1, 3 are busy"):
            await past.engine(4)
        made[1].go.set()
        made[3].go.set()
        await asyncio.gather(*running, busy)
        await past.close()
        assert all(each.closed for each in made.values())

    asyncio.run(run())
