"""Packages of environments: push, list, yank; and the index that pip and uv install from (PEP 503, 658, 691, 592).

A file's name, version and bytes never change once they are pushed. The index shows a caller what its key sees, and an
attempt's agent what its run's project sees. pip and uv send the key as the password of basic authentication.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from tandem.control import packages
from tandem.control.api.requests import Plane, answer, asked, attempt_of, caller_of, written_once
from tandem.control.callers import Caller
from tandem.control.tables import Package, PackageVersion
from tandem.io.wheel_file import open_wheel
from tandem.serve.http.openapi_document import JSON, PAGE, speaks
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.service import aside
from tandem.shapes.packages import (
    SIMPLE_JSON,
    PackageInfo,
    PackageList,
    PackageVersionInfo,
    PushBody,
    YankBody,
)

SIMPLE_HTML, WHEEL = "application/vnd.pypi.simple.v1+html", "application/octet-stream"
METADATA, PROVENANCE = ".metadata", ".provenance"
"""What is added to a wheel's URL for its METADATA, and for its signed provenance."""
_FOREVER, _ASK_AGAIN = "private, max-age=31536000, immutable", "private, no-cache"


class PackageRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.router = APIRouter()
        add = self.router.add_api_route
        add("/api/packages", self.list, methods=["GET"])
        add("/api/packages", self.push, methods=["POST"], status_code=201)
        add("/api/packages/{id}", self.show, methods=["GET"])
        add("/api/packages/{id}/yank", self.yank, methods=["POST"])
        add("/simple/", self.index, methods=["GET"])
        add("/simple/{id}/", self.page, methods=["GET"])
        add("/simple/{id}/{name}", self.file, methods=["GET"])
        add("/api/attempts/{id}/simple/{name}/", self.page_for_agent, methods=["GET"])
        add("/api/attempts/{id}/simple/{name}/{file}", self.file_for_agent, methods=["GET"])

    @speaks(answer=PackageList, scope="runs:read")
    async def list(self, request: Request) -> Response:
        """List the packages of environments, with their versions."""
        caller = caller_of(request, "runs:read")

        def found(session: Session) -> list[PackageInfo]:
            return [packages.info(session, row) for row in packages.listed(session, caller)]

        return answer(PackageList(items=await self.plane.store.read(found)))

    @speaks(answer=PackageInfo, scope="runs:read")
    async def show(self, id: str, request: Request) -> Response:
        """Return a package by the name of its distribution."""
        caller = caller_of(request, "runs:read")
        return answer(
            await self.plane.store.read(lambda session: packages.info(session, packages.find(session, caller, id)))
        )

    @speaks(PushBody, key="required", status=201, answer=PackageVersionInfo, scope="env")
    async def push(self, request: Request) -> Response:
        """Add a version. Pushing the same file again changes nothing; another file of the same version is refused."""
        caller = caller_of(request, "env")
        body = await asked(request, PushBody, keep=True)
        if hashlib.sha256(body.wheel).hexdigest() != body.sha256:
            raise RequestRefused(422, "sha256: is not that of the wheel, which was changed on its way", field="sha256")
        content = await aside(request)(open_wheel, body.file, body.wheel)
        await self.plane.store.read(lambda session: packages.check_push(session, caller, content, body))
        await aside(request)(self.plane.shelf.put, content, body.wheel)
        versions = {"server": self.plane.release}

        def change(session: Session, again: PushBody, now: int) -> PackageVersionInfo:
            return packages.push(session, caller, content, again, self.plane.shelf, versions, now)

        return JSONResponse(await written_once(self.plane, request, PushBody, change), 201)

    @speaks(YankBody, key="required", answer=PackageVersionInfo, scope="env")
    async def yank(self, id: str, request: Request) -> Response:
        """Take a version out of what is chosen by default; who pinned it still gets it."""
        caller = caller_of(request, "env")

        def change(session: Session, body: YankBody, now: int) -> PackageVersionInfo:
            row = packages.find(session, caller, id, to_change=True)
            return packages.yank(session, row, body.version, body.why, body.undo, now)

        return JSONResponse(await written_once(self.plane, request, YankBody, change))

    # --- the index

    @speaks(answers=(PAGE, SIMPLE_HTML, SIMPLE_JSON), scope="runs:read")
    async def index(self, request: Request) -> Response:
        """List the distributions, for pip and uv."""
        caller = caller_of(request, "runs:read")
        names = [row.id for row in await self.plane.store.read(lambda session: packages.listed(session, caller))]
        told = {"meta": {"api-version": "1.1"}, "projects": [{"name": name} for name in names]}
        return _negotiated(request, told, lambda: [f'<a href="{name}/">{name}</a>' for name in names])

    @speaks(answers=(PAGE, SIMPLE_HTML, SIMPLE_JSON), scope="runs:read")
    async def page(self, id: str, request: Request) -> Response:
        """List the files of a distribution, for pip and uv."""
        caller = caller_of(request, "runs:read")
        return await self._page(request, id, lambda _: caller)

    @speaks(answers=(WHEEL, "text/plain", JSON), scope="runs:read")
    async def file(self, id: str, name: str, request: Request) -> Response:
        """Return a wheel; with `.metadata` its METADATA, with `.provenance` its signed provenance."""
        caller = caller_of(request, "runs:read")
        return await self._file(request, id, name, lambda _: caller)

    @speaks(answers=(PAGE, SIMPLE_HTML, SIMPLE_JSON))
    async def page_for_agent(self, id: str, name: str, request: Request) -> Response:
        """List the files of a distribution, for the agent of a run whose spec names it."""
        return await self._page(request, name, self._agent(request, id))

    @speaks(answers=(WHEEL, "text/plain", JSON))
    async def file_for_agent(self, id: str, name: str, file: str, request: Request) -> Response:
        """Return a file of a distribution, for the agent of a run whose spec names it."""
        return await self._file(request, name, file, self._agent(request, id))

    def _agent(self, request: Request, id: str) -> Callable[[Session], Caller]:
        attempt = attempt_of(request, id)
        return lambda session: packages.caller_for(session, attempt, self.plane.clock)

    async def _page(self, request: Request, name: str, caller: Callable[[Session], Caller]) -> Response:
        def found(session: Session) -> tuple[Package, list[PackageVersion]]:
            row = packages.find(session, caller(session), name)
            return row, packages.versions(session, row)

        row, versions = await self.plane.store.read(found)
        told = {
            "meta": {"api-version": "1.1"}, "name": row.id, "versions": [each.version for each in versions],
            "files": [_as_json(each) for each in versions],
        }  # fmt: skip
        return _negotiated(request, told, lambda: [_as_link(each) for each in versions])

    async def _file(self, request: Request, name: str, file: str, caller: Callable[[Session], Caller]) -> Response:
        wheel = next((file.removesuffix(end) for end in (METADATA, PROVENANCE) if file.endswith(end)), file)

        def found(session: Session) -> PackageVersion:
            return packages.file_of(session, packages.find(session, caller(session), name), wheel)

        row = await self.plane.store.read(found)
        headers = {"Cache-Control": _FOREVER, "X-Content-Type-Options": "nosniff"}
        if file.endswith(METADATA):
            return Response(row.metadata_text, headers=headers, media_type="text/plain; charset=utf-8")
        if file.endswith(PROVENANCE):
            return JSONResponse(row.provenance, headers=headers)
        content = await aside(request)(self.plane.shelf.read, row.sha256)
        return Response(content, headers=headers, media_type=WHEEL)


def _as_json(each: PackageVersion) -> dict[str, Any]:
    metadata = {"sha256": hashlib.sha256(each.metadata_text).hexdigest()}
    yanked = (each.yanked_why or True) if each.yanked_at else False
    return {
        "filename": each.file, "url": each.file, "hashes": {"sha256": each.sha256}, "size": each.size,
        "requires-python": each.told["requires_python"], "yanked": yanked,
        "core-metadata": metadata, "dist-info-metadata": metadata, "_tandem-provenance": f"{each.file}{PROVENANCE}",
    }  # fmt: skip


def _as_link(each: PackageVersion) -> str:
    metadata = f"sha256={hashlib.sha256(each.metadata_text).hexdigest()}"
    marks = {
        "data-requires-python": each.told["requires_python"], "data-core-metadata": metadata,
        "data-dist-info-metadata": metadata, **({"data-yanked": each.yanked_why} if each.yanked_at else {}),
    }  # fmt: skip
    told = "".join(f' {name}="{escape(value)}"' for name, value in marks.items())
    return f'<a href="{escape(each.file)}#sha256={each.sha256}"{told}>{escape(each.file)}</a>'


def _negotiated(request: Request, told: dict[str, Any], links: Callable[[], list[str]]) -> Response:
    """Answer in JSON if the caller takes it, in HTML otherwise."""
    accept = request.headers.get("accept", "")
    headers = {"Cache-Control": _ASK_AGAIN, "Vary": "Accept"}
    if SIMPLE_JSON in accept or "application/vnd.pypi.simple.latest+json" in accept:
        return JSONResponse(told, headers=headers, media_type=SIMPLE_JSON)
    head = '<!DOCTYPE html><html><head><meta name="pypi:repository-version" content="1.1"><title>index</title></head>'
    text = "\n".join([f"{head}<body>", *(f"{link}<br>" for link in links()), "</body></html>"])
    kind = SIMPLE_HTML if SIMPLE_HTML in accept else PAGE
    return Response(text, headers=headers, media_type=f"{kind}; charset=utf-8" if kind == PAGE else kind)
