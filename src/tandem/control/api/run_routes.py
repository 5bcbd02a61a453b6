"""Runs: submit, list, cancel, resume, events, and the files of their mirrors."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from sqlalchemy.orm import Session

from tandem.control import packages, queries, transitions
from tandem.control.api.requests import Plane, answer, asked, caller_of, written_once
from tandem.control.callers import Caller
from tandem.errors import NotKnown
from tandem.serve.http.openapi_document import EVENTS, JSON, speaks
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.request_bounds import AT_ONCE_BYTES, text, whole
from tandem.serve.http.service import HotRoute, aside, body_at_hand
from tandem.shapes.plans import PlanBody, PlanInfo
from tandem.shapes.runs import (
    AttemptList,
    CancelBody,
    EventInfo,
    EventPage,
    FileInfo,
    FileList,
    ResumeBody,
    RunInfo,
    RunPage,
    SubmitBody,
    TargetList,
    UsagePage,
)
from tandem.spec.environment import packages_in
from tandem.spec.load import parse_spec
from tandem.spec.package_names import package_name
from tandem.spec.parallel import check_hosts

READ_BYTES = 4 * 2**20
"""The most bytes of one answer from a file."""
_PAGE, _EVENTS = 200, 1000
_POLL_S, _SIGN_S = 0.5, 10.0


class RunRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane, self.ended = plane, asyncio.Event()
        self.router = APIRouter()
        add = self.router.add_api_route
        add("/api/plans", self.plan, methods=["POST"])
        add("/api/runs", self.submit, methods=["POST"], status_code=201)
        add("/api/runs", self.runs, methods=["GET"])
        add("/api/runs/{id}/cancel", self.cancel, methods=["POST"], status_code=202)
        add("/api/runs/{id}/resume", self.resume, methods=["POST"], status_code=202)
        add("/api/runs/{id}/events", self.events, methods=["GET"])
        add("/api/runs/{id}/attempts", self.attempts, methods=["GET"])
        add("/api/runs/{id}/files", self.files, methods=["GET"])
        add("/api/runs/{id}/files/{name:path}", self.file, methods=["GET"])
        add("/api/targets", self.targets, methods=["GET"])
        add("/api/usage", self.usage, methods=["GET"])
        self.hot = [HotRoute("/api/runs/{id}", self.run, "GET")]

    @speaks(PlanBody, answer=PlanInfo, scope="runs:write")
    async def plan(self, request: Request) -> Response:
        """Estimate memory, time and cost of a spec on each offer of a target. Starts nothing. It is for keys that may
        submit: whether a path that the spec names is on this machine can be seen in the answer."""
        caller_of(request, "runs:write")
        body = await asked(request, PlanBody, keep=True)
        await self._checked(request, body)
        offered = {each.name: each for each in await self.plane.offers()}
        if body.target not in offered:
            raise RequestRefused(503, f"target = '{body.target}': says nothing now; send it again", field="target")
        return answer(await self.plane.plan(body, offered[body.target]))

    async def _checked(self, request: Request, body: PlanBody | SubmitBody) -> tuple[str, bool, int]:
        """Check a spec and its target; return its run's name, whether it leaves a package's version open, and on how
        many hosts it is."""
        read = partial(_read_spec, body.spec_toml, body.target, self.plane.kinds)
        found = await aside(request)(read) if len(body_at_hand(request)) > AT_ONCE_BYTES else read()
        if body.target not in self.plane.prices:
            known = ", ".join(sorted(self.plane.prices)) or "none"
            raise RequestRefused(422, f"target = '{body.target}': this server has {known}", field="target")
        return found

    @speaks(SubmitBody, key="required", status=201, answer=RunInfo, scope="runs:write")
    async def submit(self, request: Request) -> Response:
        """Queue a run of a spec, on a target. The answer says where it is; the same key gives the same run."""
        caller = caller_of(request, "runs:write")
        body = await asked(request, SubmitBody, keep=True)
        name, leaves_open, hosts = await self._checked(request, body)

        def change(session: Session, body: SubmitBody, now: int) -> RunInfo:
            project, spec_toml = queries.project_of(session, caller, body.project), body.spec_toml
            if leaves_open:
                spec_toml = packages.with_versions(session, caller, project, spec_toml)
            submitted = transitions.Submitted(
                caller.org, body.name or name, spec_toml, body.target,
                project=project, group=body.group, created_by=caller.key,
                usd_per_hour=hosts * self.plane.prices[body.target], max_cost_usd=body.max_cost_usd,
                retries=body.retries, secrets=tuple(sorted(set(body.secrets))),
            )  # fmt: skip
            return queries.run_info(session, caller, transitions.submit(session, submitted, now), now)

        return JSONResponse(await written_once(self.plane, request, SubmitBody, change), 201)

    @speaks(query=("state", "project", "group", "before", "limit"), answer=RunPage, scope="runs:read")
    async def runs(self, request: Request) -> Response:
        """List runs, the newest first."""
        caller, limit = caller_of(request, "runs:read"), whole(request, "limit", 50, _PAGE)
        filters = {name: text(request, name) for name in ("state", "project", "group")}
        before, now = text(request, "before"), self.plane.clock()

        def read(session: Session) -> list[RunInfo]:
            found = queries.run_page(session, caller, filters, before, limit, now)
            return [self.plane.with_progress(each) for each in found]

        items = await self.plane.store.read(read)
        return answer(RunPage(items=items, next=items[-1].id if len(items) == limit else ""))

    @speaks(answer=RunInfo, scope="runs:read")
    async def run(self, request: Request) -> Response:
        """Return one run."""
        caller, id, now = caller_of(request, "runs:read"), request.path_params["id"], self.plane.clock()
        shown = self.plane.with_progress
        return answer(await self.plane.store.read(lambda session: shown(queries.run_info(session, caller, id, now))))

    @speaks(CancelBody, optional=True, key="required", status=202, answer=RunInfo, scope="runs:write")
    async def cancel(self, id: str, request: Request) -> Response:
        """Ask a run to end; again, or after its end, is harmless."""
        caller = caller_of(request, "runs:write")

        def change(session: Session, body: CancelBody, now: int) -> RunInfo:
            queries.visible_run(session, caller, id)
            transitions.ask_to_end(session, caller.org, id, "stop" if body.save else "cancel", now)
            return queries.run_info(session, caller, id, now)

        return JSONResponse(await written_once(self.plane, request, CancelBody, change), 202)

    @speaks(ResumeBody, optional=True, key="required", status=202, answer=RunInfo, scope="runs:write")
    async def resume(self, id: str, request: Request) -> Response:
        """Queue a run again that stopped, failed or was cancelled; it goes on from its last checkpoint."""
        caller = caller_of(request, "runs:write")

        def change(session: Session, body: ResumeBody, now: int) -> RunInfo:
            queries.visible_run(session, caller, id)
            transitions.resume(session, caller.org, id, now, body.max_cost_usd)
            return queries.run_info(session, caller, id, now)

        return JSONResponse(await written_once(self.plane, request, ResumeBody, change), 202)

    @speaks(query=("after", "limit"), answers=(JSON, EVENTS), answer=EventPage, scope="runs:read")
    async def events(self, id: str, request: Request) -> Response:
        """List what happened after an event's number; with `Accept: text/event-stream`, follow it until the run ends.
        A stream goes on after the header Last-Event-ID."""
        caller, limit = caller_of(request, "runs:read"), whole(request, "limit", _EVENTS, _EVENTS)
        after = whole(request, "after", 0, 2**53)
        if EVENTS not in request.headers.get("accept", ""):
            found, _ = await self._events(caller, id, after, limit)
            return answer(EventPage(items=found, next=str(found[-1].n) if len(found) == limit else ""))
        last = request.headers.get("last-event-id", "")
        if last.isascii() and last.isdigit() and len(last) < 16:
            after = int(last)
        first = await self._events(caller, id, after, _EVENTS)  # before the stream begins: it may be a 404
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._told(caller, id, after, first), media_type=EVENTS, headers=headers)

    async def _events(self, caller: Caller, id: str, after: int, limit: int) -> tuple[list[EventInfo], bool]:
        return await self.plane.store.read(lambda session: queries.events(session, caller, id, after, limit))

    async def _told(
        self, caller: Caller, id: str, after: int, found: tuple[list[EventInfo], bool]
    ) -> AsyncIterator[str]:
        """Yield events until the run has ended or the server ends. A comment now and then shows that the stream
        lives."""
        quiet_s = 0.0
        yield ": events\n\n"
        while True:
            events, over = found
            for event in events:
                after = event.n
                yield f"id: {event.n}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"
            if over or self.ended.is_set():
                return
            quiet_s = 0.0 if events else quiet_s + _POLL_S
            if quiet_s >= _SIGN_S:
                quiet_s = 0.0
                yield ": alive\n\n"
            try:
                async with asyncio.timeout(_POLL_S):
                    await self.ended.wait()
            except TimeoutError:
                pass
            try:
                found = await self._events(caller, id, after, _EVENTS)
            except NotKnown:
                return

    @speaks(answer=AttemptList, scope="runs:read")
    async def attempts(self, id: str, request: Request) -> Response:
        """List the executions of a run."""
        caller = caller_of(request, "runs:read")
        found = await self.plane.store.read(lambda session: queries.attempts(session, caller, id))
        return answer(AttemptList(items=found))

    @speaks(answer=FileList, scope="runs:read")
    async def files(self, id: str, request: Request) -> Response:
        """List the files of a run's mirror."""
        caller = caller_of(request, "runs:read")
        await self.plane.store.read(lambda session: queries.visible_run(session, caller, id))
        streams = await self.plane.mirror.streams(id)
        items = [
            FileInfo(file=file, generation=each.generation, size=each.size) for file, each in sorted(streams.items())
        ]
        return answer(FileList(items=items))

    @speaks(query=("offset", "limit"), answers=("application/octet-stream",), scope="runs:read")
    async def file(self, id: str, name: str, request: Request) -> Response:
        """Return bytes of a mirrored file. X-Size and X-Generation say how the file is."""
        caller = caller_of(request, "runs:read")
        offset, limit = whole(request, "offset", 0, 2**53), whole(request, "limit", READ_BYTES, READ_BYTES)
        await self.plane.store.read(lambda session: queries.visible_run(session, caller, id))
        read = await self.plane.mirror.read(id, name, offset, limit)
        headers: dict[str, Any] = {
            "X-Size": str(read.size), "X-Generation": str(read.generation), "X-Content-Type-Options": "nosniff",
            "Content-Disposition": "attachment", "Cache-Control": "no-store",
        }  # fmt: skip
        return Response(read.data, headers=headers, media_type="application/octet-stream")

    @speaks(answer=TargetList, scope="runs:read")
    async def targets(self, request: Request) -> Response:
        """Ask every target what it offers now."""
        caller_of(request, "runs:read")
        return answer(TargetList(items=list(await self.plane.offers())))

    @speaks(query=("after", "limit", "since", "until"), answer=UsagePage, scope="runs:read")
    async def usage(self, request: Request) -> Response:
        """List what closed attempts used, once each. `since`, `until`: milliseconds since 1970, for when they ended."""
        caller, limit = caller_of(request, "runs:read"), whole(request, "limit", _EVENTS, _EVENTS)
        after, since, until = (
            text(request, "after"),
            whole(request, "since", 0, 2**53),
            whole(request, "until", 0, 2**53),
        )
        found = await self.plane.store.read(
            lambda session: queries.usage_page(session, caller, after, limit, since, until)
        )
        return answer(UsagePage(items=found, next=found[-1].key if len(found) == limit else ""))


def _read_spec(text: str, target: str, kinds: Mapping[str, str]) -> tuple[str, bool, int]:
    """Check a spec; return its run's name, whether it names a package without a version, and its hosts."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestRefused(422, f"spec_toml: is not TOML: {error}", field="spec_toml") from None
    spec = parse_spec(raw)
    if target in kinds:
        check_hosts(spec.parallel, target, kinds[target])
    environment = getattr(spec, "environment", None)
    names = [] if environment is None or environment.pins else packages_in(environment.name, environment.params)
    return spec.name, any(not package_name(name).version for name in names), max(1, spec.parallel.hosts)
