"""`tandem rollouts serve`: the rollout service, a durable queue of groups between environments and a trainer."""

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
    "--insecure-no-auth: the endpoints of Atropos require no token; every process on this machine may read, fill and "
    "clear the queue"
)


def serve_rollouts(
    listen: Listen,
    *,
    atropos: bool = False,
    insecure_no_auth: bool = False,
    gateway: str = "",
    gateway_token_file: str | Path | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. `atropos`: also serve the endpoints of Atropos; their clients send no token, and
    `insecure_no_auth` accepts them without one, on loopback only. `gateway`: the URL of the gateway that the Atropos
    environments sample from; it says which version of the weights sampled each token that they post."""
    if gateway and (gateway_token_file is None or not atropos):
        lacks = "--atropos: it is for posts of Atropos environments" if not atropos else "--gateway-token-file"
        raise SpecError(f"--gateway = '{gateway}': needs {lacks}")
    if insecure_no_auth and not (atropos and listen.is_loopback):
        raise SpecError(
            f"--insecure-no-auth works only with --atropos and a loopback --host; given: --host = '{listen.host}' and "
            f"{'' if atropos else 'no '}--atropos"
        )
    token = listen.token()
    queue = RolloutQueue(listen.data_dir)
    default_ready_file = listen.data_dir / READY_FILE
    default_ready_file.unlink(missing_ok=True)  # left by an earlier start, possibly with another address
    listen = dataclasses.replace(listen, ready_file=listen.ready_file or default_ready_file)
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
    router.include_router(beside)  # first: its route for / greets Atropos clients and shows browsers the page
    router.include_router(service.router)
    paths = {route.path for route in (*hot, *beside.routes) if isinstance(route, Route)}
    return dataclasses.replace(
        service,
        router=router,
        hot=[*hot, *service.hot],
        open_paths=service.open_paths | (paths if open_to_all else set()),
        patient_paths=frozenset(paths),
    )
