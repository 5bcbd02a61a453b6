"""The dashboard over HTTP: pages without data in them, and the data for those who may see it.

`tandem dashboard` serves the runs of a directory; the control plane serves the same pages over its mirrors.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from tandem.dashboard.following import Follower
from tandem.dashboard.views import Runs, plain
from tandem.errors import NotKnown, RunError, TandemError
from tandem.io.log_lines import LOGS
from tandem.obs.chart_data import LIBRARY, LIBRARY_STYLE
from tandem.obs.look import LOOK
from tandem.serve.http.openapi_document import EVENTS, PAGE, speaks
from tandem.serve.http.pages import page_headers
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.request_bounds import text, whole
from tandem.serve.http.service import Service, aside

_PAGES = Path(__file__).parent / "pages"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": PAGE, ".svg": "image/svg+xml"}
_POLL_S, _SIGN_S = 0.5, 10.0
_MOST_NAMES, _MOST_RUNS = 40, 8
_SCOPE = "runs:read"
"""Of a key, where keys have scopes."""

View = Callable[[Runs], dict[str, Any]]
RunsFor = Callable[[Request, Sequence[str]], Awaitable[Runs]]
"""Returns the runs of these names, or all for none, that the request may see. NotKnown for others."""
AboutServer = Callable[[Request], Awaitable[dict[str, Any]]]


def dashboard_service(directory: Path) -> Service:
    """Serve the runs in a directory. It reads them, and changes nothing."""
    runs = Runs(directory)

    async def runs_for(request: Request, names: Sequence[str]) -> Runs:
        return runs

    async def about(request: Request) -> dict[str, Any]:
        return {"where": str(directory), "pages": [], "may": []}

    routes = DashboardRoutes(runs_for, about)
    return Service("tandem dashboard", routes.router, open_paths=page_paths(), ending=routes.ended.set)


def page_paths() -> frozenset[str]:
    """Return the paths of the pages. They hold no data, so anyone may load them."""
    return frozenset({"/", *(f"/pages/{name}" for name in _files())})


@cache
def _files() -> dict[str, Path]:
    """Return the files of the pages by their names; uPlot's and the look are those of report.html."""
    found = {path.relative_to(_PAGES).as_posix(): path for path in _PAGES.rglob("*") if path.suffix in _TYPES}
    return {**found, "look.css": LOOK, "vendor/uplot.js": LIBRARY, "vendor/uplot.css": LIBRARY_STYLE}


class DashboardRoutes:
    def __init__(self, runs_for: RunsFor, about: AboutServer) -> None:
        self._runs_for, self._about, self.ended = runs_for, about, asyncio.Event()
        self.router = APIRouter()
        add = self.router.add_api_route
        add("/", _page_route("index.html"), methods=["GET"])
        for name in _files():
            add(f"/pages/{name}", _page_route(name), methods=["GET"])
        add("/api/views", self.about, methods=["GET"])
        add("/api/views/runs", self.all, methods=["GET"])
        add("/api/views/compare", self.compare, methods=["GET"])
        for kind in ("curves", "answers", "tokens", "versions", "log", "follow"):
            add(f"/api/views/runs/{{id}}/{kind}", getattr(self, kind), methods=["GET"])
        add("/api/views/runs/{id}", self.overview, methods=["GET"])

    @speaks(scope=_SCOPE)
    async def about(self, request: Request) -> Response:
        """Say what this server has besides runs, and what the caller may do: for the dashboard's pages."""
        return _told(await self._about(request))

    @speaks(scope=_SCOPE)
    async def all(self, request: Request) -> Response:
        """List the runs, the newest first."""
        return await self._read(request, (), lambda runs: runs.all())

    @speaks(scope=_SCOPE)
    async def overview(self, id: str, request: Request) -> Response:
        """Return how a run stands and what it came to."""
        return await self._read(request, (id,), lambda runs: runs.overview(id))

    @speaks(scope=_SCOPE, query=("names",))
    async def curves(self, id: str, request: Request) -> Response:
        """Return columns of metrics: `names` with commas between them, `*` for any letters."""
        names = request.query_params.get("names", "*").split(",")[:_MOST_NAMES]
        return await self._read(request, (id,), lambda runs: runs.curves(id, names))

    @speaks(scope=_SCOPE, query=("first", "last", "grep", "min_reward", "max_reward"))
    async def answers(self, id: str, request: Request) -> Response:
        """Return answers that a run trained on, of the steps `first` to `last`."""
        first, last = whole(request, "first", 0, 2**53), whole(request, "last", 0, 2**53)
        wanted = {
            "steps": (first, last or first) if first or last else None,
            "grep": text(request, "grep"),
            "min_reward": _decimal(request, "min_reward"),
            "max_reward": _decimal(request, "max_reward"),
        }
        return await self._read(request, (id,), lambda runs: runs.answers(id, **wanted))

    @speaks(scope=_SCOPE, query=("sample",))
    async def tokens(self, id: str, request: Request) -> Response:
        """Return the tokens of an answer, with their logprobs and versions: `sample` is the answer's id."""
        sample = whole(request, "sample", 0, 2**53)
        return await self._read(request, (id,), lambda runs: runs.tokens(id, sample))

    @speaks(scope=_SCOPE)
    async def versions(self, id: str, request: Request) -> Response:
        """Return the proof of each version of the weights."""
        return await self._read(request, (id,), lambda runs: runs.versions(id))

    @speaks(scope=_SCOPE, query=("file", "before"))
    async def log(self, id: str, request: Request) -> Response:
        """Return the last lines of a log, or those before line `before`."""
        file, before = text(request, "file") or LOGS[0], whole(request, "before", 0, 2**53)
        return await self._read(request, (id,), lambda runs: runs.log(id, file, before))

    @speaks(scope=_SCOPE, query=("run",))
    async def compare(self, request: Request) -> Response:
        """Compare runs with the first of them: `run` twice or more."""
        names = request.query_params.getlist("run")[:_MOST_RUNS]
        if len(names) < 2:
            raise RequestRefused(422, "run: name two runs or more", field="run")
        return await self._read(request, names, lambda runs: runs.compare(names))

    @speaks(scope=_SCOPE, answers=(EVENTS,))
    async def follow(self, id: str, request: Request) -> Response:
        """Stream the rows of a run's metrics as they are written, and how it stands. It goes on after Last-Event-ID."""
        last = request.headers.get("last-event-id", "")
        start = int(last) if last.isascii() and last.isdigit() and len(last) < 16 else -1
        follower = Follower((await self._runs_for(request, (id,))).place(id), start)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(id, follower, request), media_type=EVENTS, headers=headers)

    async def _events(self, run: str, follower: Follower, request: Request) -> AsyncIterator[str]:
        quiet_s, before = 0.0, ""
        yield f": follow\nid: {follower.at}\n\n"  # a page that breaks off before the first row goes on from here
        while not self.ended.is_set():
            try:
                rows = await aside(request)(follower.rows)  # before the state: the last row comes before the end
                sight = await aside(request)((await self._runs_for(request, (run,))).stands, run)
            except (TandemError, OSError, ValueError):  # damaged or gone meanwhile; the page's next question says so
                return
            told = [f"id: {end}\nevent: row\ndata: {json.dumps(plain(row))}\n\n" for end, row in rows]
            if (now := json.dumps(sight)) != before:
                before = now
                told.append(f"event: stands\ndata: {now}\n\n")
            quiet_s = 0.0 if told else quiet_s + _POLL_S
            if quiet_s >= _SIGN_S:
                told, quiet_s = [": alive\n\n"], 0.0
            if told:
                yield "".join(told)
            try:
                async with asyncio.timeout(_POLL_S):
                    await self.ended.wait()
            except TimeoutError:
                pass

    async def _read(self, request: Request, names: Sequence[str], view: View) -> Response:
        """Answer with a view of these runs. What a run's own files forbid is told with 409, and not as a failure of the
        service."""
        runs = await self._runs_for(request, names)
        try:
            found = await aside(request)(view, runs)
        except NotKnown:
            raise
        except (RunError, OSError, ValueError) as error:
            raise RequestRefused(409, str(error)) from error
        return _told(found)


def _told(found: dict[str, Any]) -> Response:
    text = json.dumps(found, allow_nan=False)
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})


def _page_route(name: str) -> Callable[[Request], Awaitable[Response]]:
    @speaks(answers=(_TYPES[Path(name).suffix],))
    async def answer(request: Request) -> Response:
        body, tag = _body(name)
        headers = {**page_headers("'self'", "'self'", images="'self'"), "ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=_TYPES[Path(name).suffix], headers=headers)

    return answer


@cache
def _body(name: str) -> tuple[bytes, str]:
    body = _files()[name].read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'


def _decimal(request: Request, name: str) -> float | None:
    told = text(request, name)
    try:
        return float(told) if told else None
    except ValueError:
        raise RequestRefused(422, f"{name} = '{told[:40]}': must be a number", field=name) from None
