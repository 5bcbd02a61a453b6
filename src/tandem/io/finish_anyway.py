"""Run a task to completion even if its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: Awaitable[T], *, given_up: Callable[[asyncio.Future[T]], None] | None = None) -> T:
    """Await the work. If the caller is cancelled, finish the work first, so that the next call does not find it half
    done; `given_up` is called at once."""
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
