"""Secrets: values go in, and none comes out but in the answer to a claim (agent_routes.py)."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from tandem.control import queries, vault
from tandem.control.api.requests import Nothing, Plane, answer, caller_of, written_once
from tandem.serve.http.openapi_document import speaks
from tandem.serve.http.refusals import RequestRefused
from tandem.shapes.runs import SecretBody, SecretInfo, SecretList


class SecretRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.router = APIRouter()
        add = self.router.add_api_route
        add("/api/secrets", self.secrets, methods=["GET"])
        add("/api/secrets", self.put, methods=["POST"], status_code=201)
        add("/api/secrets/{id}/delete", self.delete, methods=["POST"])

    @speaks(answer=SecretList, scope="secrets")
    async def secrets(self, request: Request) -> Response:
        """List secrets, without their values."""
        caller = caller_of(request, "secrets")

        def found(session: Session) -> list[SecretInfo]:
            rows = vault.secrets_seen(session, caller.org, caller.project)
            return [queries.secret_info(session, row) for row in rows]

        return answer(SecretList(items=await self.plane.store.read(found)))

    @speaks(SecretBody, key="required", status=201, answer=SecretInfo, scope="secrets")
    async def put(self, request: Request) -> Response:
        """Make a secret, or give it a new value, which the next attempts get."""
        caller = caller_of(request, "secrets")

        def change(session: Session, body: SecretBody, now: int) -> SecretInfo:
            if caller.project and not body.project:
                raise RequestRefused(403, "this key belongs to one project; name it as the secret's", field="project")
            project = queries.project_of(session, caller, body.project) if body.project else ""
            row = vault.put_secret(
                session, self.plane.keys, caller.org, project, body.name, body.value, caller.key, now
            )
            return queries.secret_info(session, row)

        return JSONResponse(await written_once(self.plane, request, SecretBody, change, secret=True), 201)

    @speaks(Nothing, optional=True, key="required", answer=SecretInfo, scope="secrets")
    async def delete(self, id: str, request: Request) -> Response:
        """Delete a secret; a conflict while a run on its way needs it."""
        caller = caller_of(request, "secrets")

        def change(session: Session, _: Nothing, now: int) -> SecretInfo:
            name = id if id.isprintable() else ""
            return queries.secret_info(session, vault.delete_secret(session, caller.org, caller.project, name))

        return JSONResponse(await written_once(self.plane, request, Nothing, change))
