"""Who listens to an online server's events hears the newest, and its end."""

from __future__ import annotations

import asyncio

from tandem.online.events import Events


def test_a_listener_hears_all_until_the_end():
    async def listen() -> list[int]:
        return [event.data["n"] async for event in events.listen()]

    async def run() -> None:
        listeners = [asyncio.create_task(listen()) for _ in range(2)]
        await asyncio.sleep(0)
        for n in range(3):
            events.put("job", {"n": n})
        events.end()
        assert await asyncio.wait_for(asyncio.gather(*listeners), 10) == [[0, 1, 2]] * 2

    events = Events()
    asyncio.run(run())


def test_who_does_not_keep_up_loses_the_oldest():
    async def run() -> None:
        heard = events.listen()
        first = asyncio.ensure_future(anext(heard))
        await asyncio.sleep(0)
        for n in range(1500):
            events.put("job", {"n": n})
        events.end()
        numbers = [(await first).data["n"], *[event.data["n"] async for event in heard]]
        assert numbers == list(range(1500 - len(numbers), 1500))
        assert len(numbers) == 999  # a thousand with the end

    events = Events()
    asyncio.run(run())
