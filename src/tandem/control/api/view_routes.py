"""The dashboard's routes: its pages over the mirrors, for keys that may read runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from sqlalchemy.orm import Session

from tandem.control import queries
from tandem.control.api.requests import Plane, caller_of
from tandem.control.callers import Caller
from tandem.dashboard.mirrored import EndedRows, MirroredRuns, Told
from tandem.dashboard.service import DashboardRoutes

MOST_RUNS = 500
"""In the list, the newest first."""
_PAGES = {
    "deployments": "deploy",
    "playground": "chat",
    "environments": "runs:read",
    "targets": "runs:read",
    "usage": "runs:read",
    "keys": "keys",
    "audit": "admin",
}


def view_routes(plane: Plane) -> DashboardRoutes:
    """Return the dashboard's routes over the mirrors of a control plane."""
    ended: EndedRows = {}

    async def runs_for(request: Request, names: Sequence[str]) -> MirroredRuns:
        caller, now = caller_of(request, "runs:read"), plane.clock()

        def read(session: Session) -> dict[str, Told]:
            if names:
                return {name: _told(session, caller, name, now) for name in names}
            found = queries.run_page(session, caller, {}, "", MOST_RUNS, now)
            return {info.id: Told(info) for info in found}

        return MirroredRuns(plane.mirror.directory, await plane.store.read(read), ended)

    async def about(request: Request) -> dict[str, Any]:
        caller = caller_of(request, "runs:read")
        pages = [page for page, scope in _PAGES.items() if scope in caller.scopes]
        if caller.project and "audit" in pages:
            pages.remove("audit")
        return {"where": "control server", "pages": pages, "may": ["write"] if "runs:write" in caller.scopes else []}

    return DashboardRoutes(runs_for, about)


def _told(session: Session, caller: Caller, run: str, now: int) -> Told:
    info = queries.run_info(session, caller, run, now)
    spec = queries.visible_run(session, caller, run).spec_toml
    return Told(info, spec, tuple(queries.attempts(session, caller, run)))
