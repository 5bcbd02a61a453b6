"""`tandem control serve`: the control plane in one process, its loop and its HTTP API."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import urlsplit

from tandem.build.targets import AnyTarget, OnlineSettings, open_provider, read_online, read_targets
from tandem.control import queries
from tandem.control.api.requests import Plane
from tandem.control.api.service import REQUESTS_PER_S, AssistantApp, control_service
from tandem.control.audit import AuditLog
from tandem.control.callers import Callers, all_keys
from tandem.control.decide import AttemptView, RunView
from tandem.control.maintenance import MIRRORS, PACKAGES
from tandem.control.mirror import Mirror
from tandem.control.openid import OpenIdProvider, read_settings
from tandem.control.packages import Shelf
from tandem.control.reconcile import Reconciler
from tandem.control.replicas import OnlineServer
from tandem.control.sealing import MasterKeys, read_master_keys
from tandem.control.store import Store
from tandem.control.tokens import attempt_secret, attempt_token
from tandem.control.vault import wrap_all_again
from tandem.errors import SpecError
from tandem.io.garbage_collector import freeze_what_is_there
from tandem.io.own_release import own_release
from tandem.io.provenance import read_signer
from tandem.job_types import Job, Need
from tandem.recipes.plan_offers import ChildPlanner
from tandem.recipes.run_needs import need_of
from tandem.recipes.targets import ask_targets
from tandem.serve.http.httptools_protocol import FastHttp
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import create_app
from tandem.shapes.agent import TOKEN_VARIABLE
from tandem.shapes.runs import OfferInfo, TargetInfo


def serve_control(
    listen: Listen,
    *,
    database: str = "",
    targets: str | Path | None = None,
    url: str = "",
    secrets_key_file: str | Path | None = None,
    requests_per_s: float = REQUESTS_PER_S,
    oidc: str | Path | None = None,
    assistant: Callable[[Callable[[], str], Path], AssistantApp] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; runs go on meanwhile. `database`: of PostgreSQL; default: SQLite in the data
    directory. `targets`: the file of targets. `url`: where the targets' machines reach this server; default: where it
    listens. `secrets_key_file`: the master keys of secrets; default: the data directory's own.
    `requests_per_s`: that each key may send; 0: no limit. `oidc`: the file of the OpenID provider. `assistant`: makes
    what answers /mcp, from where this server answers itself and where its mirrors are."""
    file = None if targets is None else Path(targets)
    known, online = read_targets(file), {name: _online(name, each) for name, each in read_online(file).items()}
    token, secret = listen.token(), attempt_secret(listen.data_dir)
    keys = read_master_keys(listen.data_dir, None if secrets_key_file is None else Path(secrets_key_file))
    store = Store(listen.data_dir, database)
    asyncio.run(store.write(lambda session: wrap_all_again(session, keys)))
    served: list[Server] = []

    def own_url() -> str:
        return url.rstrip("/") or (served[0].url if served else "")

    loop = _loop(store, known, secret, own_url)
    kinds: dict[str, str] = {name: each.kind for name, each in known.items()}
    plane = replace(_plane(store, known, token, secret, keys, listen.data_dir, loop), online=online, kinds=kinds)
    if oidc is not None:
        openid = OpenIdProvider(read_settings(Path(oidc)), keys.digest, own_url)
        asyncio.run(store.read(openid.check_grants))
        plane = replace(plane, openid=openid)

    async def run() -> None:
        while not own_url():  # a free port is known only once the socket is open
            await asyncio.sleep(0.02)
        await loop.run()

    door = None if assistant is None else assistant(lambda: served[0].url, plane.mirror.directory)
    service = control_service(plane, run, loop.close, requests_per_s=requests_per_s, assistant=door)
    app = create_app(service, token="", hosts=allowed_hosts(listen, url))
    freeze_what_is_there()
    served.append(Server(app, listen, print, FastHttp))
    served[0].run()


def allowed_hosts(listen: Listen, url: str) -> frozenset[str] | None:
    """Return the Host names to answer to: this machine's own, and that of `url`, which a proxy passes on. None: any."""
    if listen.hosts is None or not url:
        return listen.hosts
    if not (name := urlsplit(url).hostname):
        raise SpecError(f"--url = '{url}': write where machines reach this server, as in https://tandem.example.org")
    return listen.hosts | {name}


def _online(name: str, settings: OnlineSettings) -> OnlineServer:
    try:
        token = Path(settings.token_file).expanduser().read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise SpecError(f"online.{name}.token_file = '{settings.token_file}': cannot be read: {error}") from error
    return OnlineServer(settings.url.rstrip("/"), token, settings.model)


def _plane(
    store: Store,
    targets: Mapping[str, AnyTarget],
    token: str,
    secret: bytes,
    keys: MasterKeys,
    data_dir: Path,
    loop: Reconciler,
) -> Plane:
    org = asyncio.run(store.write(lambda session: queries.make_org(session, "default", now_ms()))).id
    callers = Callers(token, secret, org, asyncio.run(store.read(all_keys)), now_ms)

    async def offers() -> list[TargetInfo]:
        return [
            TargetInfo(
                name=each.target, kind=each.kind, error=each.error,
                offers=[OfferInfo.model_validate(asdict(offer)) for offer in each.offers],
            )
            for each in await ask_targets(targets, Need())
        ]  # fmt: skip

    prices = {name: each.usd_per_hour for name, each in targets.items()}
    mirror, audit = Mirror(data_dir / MIRRORS, store), AuditLog(secret, data_dir)
    shelf = Shelf(data_dir / PACKAGES, read_signer(data_dir))
    return Plane(
        store, mirror, callers, keys, audit, now_ms, prices, offers, ChildPlanner(), loop.wake, shelf, own_release()
    )  # fmt: skip


def _loop(store: Store, targets: Mapping[str, AnyTarget], secret: bytes, url: Callable[[], str]) -> Reconciler:
    async def job_of(run: RunView, attempt: AttemptView) -> Job:
        need = await need_of(run.spec_toml, providers[attempt.target], serves=run.serves)
        argv = (targets[attempt.target].tandem, "agent", f"{url()}/api/attempts/{attempt.id}")
        return Job(attempt.name, argv, need, env={TOKEN_VARIABLE: attempt_token(secret, attempt.id)})

    providers = {name: open_provider(each) for name, each in targets.items()}
    prefix = f"tandem-{hashlib.sha256(secret).hexdigest()[:8]}-"
    return Reconciler(store, providers, job_of, prefix=prefix, clock=now_ms)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
