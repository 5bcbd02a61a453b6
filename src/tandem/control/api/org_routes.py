"""Orgs, projects, keys, and the audit log."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from tandem.control import queries
from tandem.control.api.requests import Nothing, Plane, answer, caller_of, written_once
from tandem.control.audit import audit_rows
from tandem.control.callers import Caller
from tandem.control.ids import new_id
from tandem.control.tables import Key, Org
from tandem.control.tokens import hash_of, new_key_token
from tandem.errors import Conflict, NotKnown
from tandem.serve.http.openapi_document import speaks
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.request_bounds import whole
from tandem.shapes.runs import (
    AuditInfo,
    AuditPage,
    KeyBody,
    KeyInfo,
    KeyList,
    Me,
    OrgBody,
    OrgInfo,
    ProjectBody,
    ProjectInfo,
    ProjectList,
)

AUDIT_PAGE = 1000


class OrgRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.router = APIRouter()
        add = self.router.add_api_route
        add("/api/me", self.me, methods=["GET"])
        add("/api/orgs", self.make_org, methods=["POST"], status_code=201)
        add("/api/projects", self.projects, methods=["GET"])
        add("/api/projects", self.put_project, methods=["POST"], status_code=201)
        add("/api/keys", self.keys, methods=["GET"])
        add("/api/keys", self.make_key, methods=["POST"], status_code=201)
        add("/api/keys/{id}/revoke", self.revoke, methods=["POST"])
        add("/api/audit", self.audit, methods=["GET"])

    @speaks(answer=Me)
    async def me(self, request: Request) -> Response:
        """Say who the caller is, and what it may do."""
        caller = caller_of(request)
        told = await self.plane.store.read(lambda session: queries.me(session, caller))
        return answer(told.model_copy(update={"signing_key": self.plane.shelf.signer.public}))

    @speaks(OrgBody, key="required", status=201, answer=OrgInfo)
    async def make_org(self, request: Request) -> Response:
        """Make an org and its project "default". Only the operator may."""
        _operator(caller_of(request))

        def change(session: Session, body: OrgBody, now: int) -> OrgInfo:
            return queries.make_org(session, body.name, now)

        return JSONResponse(await written_once(self.plane, request, OrgBody, change), 201)

    @speaks(answer=ProjectList, scope="runs:read")
    async def projects(self, request: Request) -> Response:
        """List the projects that the caller may see, with what they have spent."""
        caller = caller_of(request, "runs:read")
        found = await self.plane.store.read(lambda session: queries.projects(session, caller))
        return answer(ProjectList(items=found))

    @speaks(ProjectBody, key="required", status=201, answer=ProjectInfo, scope="admin")
    async def put_project(self, request: Request) -> Response:
        """Make a project, or change its budget and its number of runs."""
        caller = _of_whole_org(caller_of(request, "admin"))

        def change(session: Session, body: ProjectBody, now: int) -> ProjectInfo:
            made = queries.put_project(session, caller.org, body.name, body.budget_usd, body.max_live_runs, now)
            return next(each for each in queries.projects(session, caller) if each.id == made)

        return JSONResponse(await written_once(self.plane, request, ProjectBody, change), 201)

    @speaks(answer=KeyList, scope="keys")
    async def keys(self, request: Request) -> Response:
        """List keys, without the keys themselves."""
        caller = caller_of(request, "keys")
        found = await self.plane.store.read(lambda session: queries.keys(session, caller))
        return answer(KeyList(items=found))

    @speaks(KeyBody, key="required", status=201, answer=KeyInfo, scope="keys")
    async def make_key(self, request: Request) -> Response:
        """Make a key. This answer alone has the key itself; a repeated request is a conflict, which names its id."""
        caller = caller_of(request, "keys")
        made: list[tuple[Key, str]] = []

        def change(session: Session, body: KeyBody, now: int) -> KeyInfo:
            row, token = _new_key(session, caller, body, now)
            made.append((row, token))
            return queries.key_info(session, row)  # what is kept for a repeated request has no key in it

        told = await written_once(self.plane, request, KeyBody, change)
        if not made:
            raise Conflict(
                f"this request made key '{told['id']}', which was shown then and is kept nowhere; revoke it and make "
                "another",
                field="idempotency-key",
            )
        row, token = made[-1]
        self.plane.callers.put(row)
        return JSONResponse({**told, "key": token}, 201, {"Cache-Control": "no-store"})

    @speaks(Nothing, optional=True, key="required", answer=KeyInfo, scope="keys")
    async def revoke(self, id: str, request: Request) -> Response:
        """Revoke a key; again is harmless."""
        caller = caller_of(request, "keys")
        changed: list[Key] = []

        def change(session: Session, _: Nothing, now: int) -> KeyInfo:
            row = session.get(Key, id) if id.isprintable() else None
            if row is None or row.org != caller.org or (caller.project and row.project != caller.project):
                raise NotKnown(f"there is no key '{id:.40}'", field="key")
            row.revoked_at = row.revoked_at or now
            session.flush()
            changed.append(row)
            return queries.key_info(session, row)

        told = await written_once(self.plane, request, Nothing, change)
        for row in changed:
            self.plane.callers.put(row)
        return JSONResponse(told)

    @speaks(query=("after", "limit"), answer=AuditPage, scope="admin")
    async def audit(self, request: Request) -> Response:
        """List who did what in the org, the oldest first; the operator also sees what was done to the server."""
        caller = _of_whole_org(caller_of(request, "admin"))
        after, limit = whole(request, "after", 0, 2**53), whole(request, "limit", AUDIT_PAGE, AUDIT_PAGE)
        orgs = [caller.org, *([""] if caller.is_operator else [])]
        rows = await self.plane.store.read(lambda session: audit_rows(session, orgs, after, limit))
        items = [
            AuditInfo(
                n=row.n, at=row.at, actor=row.actor, action=row.action, item=row.item, told=json.loads(row.told),
                mac=row.mac,
            )
            for row in rows
        ]  # fmt: skip
        return answer(AuditPage(items=items, next=str(items[-1].n) if len(items) == limit else ""))


def _operator(caller: Caller) -> None:
    if not caller.is_operator:
        raise RequestRefused(403, "only the operator may make orgs: use the token in the data directory")


def _of_whole_org(caller: Caller) -> Caller:
    if caller.project:
        raise RequestRefused(403, "this key belongs to one project; use one of the whole org")
    return caller


def _new_key(session: Session, caller: Caller, body: KeyBody, now: int) -> tuple[Key, str]:
    """Make the row of a key that can do no more than its maker, and the key."""
    if beyond := set(body.scopes) - caller.scopes:
        raise RequestRefused(403, f"scopes: this key has not {sorted(beyond)}, so it cannot give it", field="scopes")
    org = body.org or caller.org
    if org != caller.org:
        if not caller.is_operator or session.get(Org, org) is None:
            raise NotKnown(f"there is no org '{org:.40}'", field="org")
        caller = Caller(caller.key, org, caller.scopes)
    project = queries.project_of(session, caller, body.project) if body.project else ""
    if caller.project and project != caller.project:
        raise RequestRefused(403, "this key belongs to one project; name it as the new key's", field="project")
    key_id = new_id("key")
    token = new_key_token(key_id)
    row = Key(
        id=key_id, org=org, at=now, name=body.name, sha256=hash_of(token), scopes=sorted(set(body.scopes)),
        project=project, expires_at=body.expires_at, revoked_at=0,
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row, token
