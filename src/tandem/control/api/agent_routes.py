"""The agent of one attempt: claim, append, end. `tandem.shapes.agent` says what travels, and when."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from tandem.control import deployments, transitions, vault
from tandem.control.api.requests import Plane, answer, asked, attempt_of, note
from tandem.control.decide import LEASE_MS, Ending, Want
from tandem.control.tables import Attempt, Run
from tandem.errors import NotKnown
from tandem.serve.http.openapi_document import speaks
from tandem.serve.http.service import HotRoute
from tandem.shapes.agent import (
    AdapterOrder,
    AppendBody,
    Appended,
    ClaimBody,
    Claimed,
    CostLimits,
    EndBody,
    Ended,
    ServeOrder,
)

_LEASE_S = LEASE_MS / 1000


class AgentRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self._runs: dict[str, str] = {}  # by attempt, which never changes
        self.router = APIRouter()
        self.router.add_api_route("/api/attempts/{id}/claim", self.claim, methods=["POST"])
        self.router.add_api_route("/api/attempts/{id}/end", self.end, methods=["POST"])
        self.hot = [HotRoute("/api/attempts/{id}/append", self.append)]

    @speaks(ClaimBody, answer=Claimed)
    async def claim(self, id: str, request: Request) -> Response:
        """Claim the attempt for one execution."""
        attempt = attempt_of(request, id)
        body = await asked(request, ClaimBody)
        run = await self._run_of(attempt)
        now = self.plane.clock()

        def change(session: Session) -> tuple[Attempt, Run, dict[str, str], CostLimits | None]:
            won = transitions.claim(session, attempt, body.instance, now)
            found = session.get_one(Attempt, attempt)
            of_run = session.get_one(Run, found.run)
            if won:
                told = {"run": run, "host": body.host, "secrets": of_run.secrets}
                note(self.plane, session, request, of_run.org, attempt, told, now)
            secrets = vault.secrets_of(session, self.plane.keys, of_run) if of_run.secrets else {}
            return found, of_run, secrets, transitions.limits_of(session, of_run, found, now)

        async with self.plane.mirror.locks[run]:  # what an attempt before still writes is written first
            claimed, of_run, secrets, limits = await self.plane.store.write(change)
            streams = await self.plane.mirror.streams(run)
        self.plane.wake()
        return answer(
            Claimed(
                attempt=attempt, run=run, n=claimed.n, name=of_run.name, spec_toml=of_run.spec_toml, lease_s=_LEASE_S,
                streams=streams, secrets=secrets, serve=self._order(attempt, of_run), limits=limits,
            ),
            headers={"Cache-Control": "no-store"},
        )  # fmt: skip

    @speaks(AppendBody, answer=Appended)
    async def append(self, request: Request) -> Response:
        """Renew the lease by a sign of life, and write what grew."""
        attempt = attempt_of(request, request.path_params["id"])
        body = await asked(request, AppendBody)
        run, sign, now = await self._run_of(attempt), body.sign, self.plane.clock()

        def renew(connection: Connection) -> Want:
            return transitions.renew(connection, attempt, body.instance, sign.ticks, int(sign.limit_s * 1000), now)

        async with self.plane.mirror.locks[run]:
            want = await self.plane.store.write_plain(renew)
            streams = await self.plane.mirror.append(run, body.pieces)
        adapters = await self._adapters(run) if body.serving else ()
        if body.serving:
            ordered = {each.weights for each in adapters}  # it was told now to replace what is not in it any more
            served = {weights: why for weights, why in body.served.items() if weights in ordered}
            self.plane.replicas.seen(run, attempt, body.serving, now, served)
        if want == "stop" and not self.plane.replicas.may_end(run, attempt, now):
            want = "run"  # a replica first answers what it has begun
        return answer(Appended(want=want, lease_s=_LEASE_S, adapters=adapters, streams=streams))

    @speaks(EndBody, answer=Ended)
    async def end(self, id: str, request: Request) -> Response:
        """Say how the execution ended, once the mirror holds its files."""
        attempt = attempt_of(request, id)
        body = await asked(request, EndBody)
        run, now = await self._run_of(attempt), self.plane.clock()
        ending = Ending(body.state, body.why.replace("\0", ""), body.retriable)

        def change(session: Session) -> None:
            if transitions.end(session, attempt, body.instance, ending, now):
                org = session.get_one(Run, run).org
                note(self.plane, session, request, org, attempt, {"run": run, "state": body.state}, now)

        async with self.plane.mirror.locks[run]:
            await self.plane.store.read(lambda session: transitions.check_claimed(session, attempt, body.instance))
            differ = await self.plane.mirror.differing(run, body.files)
            if not differ:
                await self.plane.store.write(change)
        self.plane.wake()
        return answer(Ended(written=not differ, differ=differ))

    def _order(self, attempt: str, run: Run) -> ServeOrder | None:
        if run.serves is None:
            return None
        token = self.plane.callers.serve_token(attempt)
        return ServeOrder(model=run.name, token=token, **run.serves)

    async def _adapters(self, run: str) -> tuple[AdapterOrder, ...]:
        """Return the revisions that a replica serves."""
        found = await self.plane.store.read(lambda session: deployments.of_replica(session, run))
        return tuple(AdapterOrder(model=model, run=trained, step=step) for model, trained, step in found)

    async def _run_of(self, attempt: str) -> str:
        if attempt not in self._runs:
            row = await self.plane.store.read(lambda session: session.get(Attempt, attempt))
            if row is None:
                raise NotKnown(f"there is no attempt '{attempt}'", field="attempt")
            self._runs[attempt] = row.run
        return self._runs[attempt]
