"""Look after deployments once a second: write down what revisions answered, roll back canaries that fail, and end
replicas that no request reaches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from sqlalchemy.orm import Session

from tandem.control import deployments, transitions
from tandem.control.api.requests import Plane
from tandem.control.counts import Counts
from tandem.errors import TandemError

_log = logging.getLogger(__name__)
_EVERY_S = 1.0


async def look_after_deployments(plane: Plane) -> None:
    """Do it until cancelled."""
    while True:
        await asyncio.sleep(_EVERY_S)
        await look_once(plane)


async def look_once(plane: Plane) -> None:
    now = plane.clock()
    try:
        if told := plane.replicas.take_counts():
            await plane.store.write(partial(_count, plane, told=told, now=now))
        idle = partial(deployments.idle, idle_ms=partial(plane.replicas.idle_ms, now=now))
        for org, run in await plane.store.read(idle):
            await plane.store.write(partial(transitions.ask_to_end, org=org, run_id=run, want="stop", now=now))
            plane.wake()
    except TandemError as error:  # a full disk, or another writer was first; what was not counted is lost
        _log.error("deployments: %s", error)


def _count(plane: Plane, session: Session, told: Mapping[tuple[str, int], Counts], now: int) -> None:
    for row, revision in deployments.count(session, told):
        why = {"revision": revision.n, "why": revision.why}
        plane.audit.add(session, now, org=row.org, actor="server", action="canary rolled back", item=row.id, told=why)
