"""The rollout service: a queue of groups, on the disk, between environments and a trainer."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from fastapi import APIRouter
from starlette.routing import Route

from tandem.errors import SpecError
from tandem.obs.rollouts_status import READY_FILE
from tandem.rollout.atropos.service import Atropos
from tandem.rollout.atropos.version_lookup import GatewayStamps
from tandem.rollout.queue.queue import RolloutQueue
from tandem.serve.http.httptools_protocol import FastHttp
from tandem.serve.http.run import Listen, serve_forever
from tandem.serve.http.service import Service, create_app
from tandem.serve.rollouts.atropos_routes import atropos_routes
from tandem.serve.rollouts.service import BODY_BYTES, rollouts_service

_log = logging.getLogger(__name__)

_NO_AUTH = (
    "--insecure-no-auth: the endpoints of Atropos ask for no token; every process on this machine may read, feed and "
    "wipe the queue"
)


def serve_rollouts(
    listen: Listen,
    *,
    atropos: bool = False,
    insecure_no_auth: bool = False,
    gateway: str = "",
    gateway_token_file: str | Path | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. `atropos`: also the endpoints of Atropos; their clients send no token, and
    `insecure_no_auth` lets them in without one, on loopback only. `gateway`: the URL of the gateway that Atropos's
    environments sample from; it says which version of the weights made each token that they post."""
    if gateway and (gateway_token_file is None or not atropos):
        lacks = "--atropos: it is for posts of Atropos's environments" if not atropos else "--gateway-token-file"
        raise SpecError(f"--gateway = '{gateway}': goes with {lacks}")
    if insecure_no_auth and not (atropos and listen.is_loopback):
        raise SpecError(
            f"--insecure-no-auth is for the clients of --atropos on this machine; with --host = '{listen.host}' and "
            f"{'' if atropos else 'no '}--atropos clients would need the token anyway, or the queue would be "
            "open to the network"
        )
    token = listen.token()
    queue = RolloutQueue(listen.data_dir)
    told_here = listen.data_dir / READY_FILE
    told_here.unlink(missing_ok=True)  # of an earlier start, which may have listened elsewhere
    listen = dataclasses.replace(listen, ready_file=listen.ready_file or told_here)
    service = rollouts_service(queue, greets=not atropos)
    if atropos:
        stamps = GatewayStamps(gateway, Path(gateway_token_file)) if gateway and gateway_token_file else None
        service = with_atropos(service, Atropos(queue, listen.data_dir, stamps), open_to_all=insecure_no_auth)
    app = create_app(service, token=token, hosts=listen.hosts, body_bytes=BODY_BYTES)
    if insecure_no_auth:
        _log.warning(_NO_AUTH)
        print(_NO_AUTH, flush=True)
    serve_forever(app, listen, http=FastHttp)


def with_atropos(service: Service, atropos: Atropos, *, open_to_all: bool) -> Service:
    """Return the service with the endpoints of Atropos. `open_to_all`: their callers need no token."""
    hot, beside = atropos_routes(atropos, may_reset=open_to_all)
    router = APIRouter()
    router.include_router(beside)  # what is at / greets their clients, and shows people our page
    router.include_router(service.router)
    paths = {route.path for route in (*hot, *beside.routes) if isinstance(route, Route)}
    return dataclasses.replace(
        service,
        router=router,
        hot=[*hot, *service.hot],
        open_paths=service.open_paths | (paths if open_to_all else set()),
        patient_paths=frozenset(paths),
    )
