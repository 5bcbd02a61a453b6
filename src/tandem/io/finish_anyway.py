"""Work that is done to its end, whoever gives up waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: Awaitable[T], *, given_up: Callable[[asyncio.Future[T]], None] | None = None) -> T:
    """Cancelled, it waits for the work all the same, and is cancelled then: whoever asks next must not find it half
    done. `given_up` hears of it at once."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
            if given_up is not None:
                given_up(task)
    if cancelled:
        raise asyncio.CancelledError from None if task.cancelled() else task.exception()
    return task.result()
