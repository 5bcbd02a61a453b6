"""A control plane in this process: its app, and callers of each kind."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
from fastapi import FastAPI

from tandem.control import queries, transitions
from tandem.control.api.requests import Plane
from tandem.control.api.service import control_service
from tandem.control.audit import AuditLog
from tandem.control.callers import Callers, all_keys
from tandem.control.mirror import Mirror
from tandem.control.openid import OpenIdProvider
from tandem.control.packages import Shelf
from tandem.control.replicas import OnlineServer
from tandem.control.sealing import read_master_keys
from tandem.control.store import Store
from tandem.control.tables import Attempt, Revision
from tandem.control.tokens import attempt_token
from tandem.io.provenance import read_signer
from tandem.recipes.plan_offers import plan_offers
from tandem.serve.http.service import create_app
from tandem.shapes.plans import PlanBody, PlanInfo
from tandem.shapes.runs import TargetInfo

TOKEN, SECRET = "operators-token", b"s" * 32
SPEC = """recipe = "rl"
name = "sorts"
model = { preset = "tiny" }
environment = { name = "sort" }
train = { steps = 1, lr = 1e-3, groups_per_step = 1, group_size = 2 }
"""
PREFIX = "tandem-x-"


@dataclass
class Served:
    """An app with its store, and a clock that the test sets."""

    app: FastAPI
    plane: Plane
    org: str
    now: list[int] = field(default_factory=lambda: [1_000_000])
    woken: list[int] = field(default_factory=list[int])
    _keys: int = 0

    def ask(self, method: str, path: str, key: str = TOKEN, body: Any = None, **headers: str) -> httpx.Response:
        return asyncio.run(self.ask_async(method, path, key, body, **headers))

    async def ask_async(
        self, method: str, path: str, key: str = TOKEN, body: Any = None, **headers: str
    ) -> httpx.Response:
        self._keys += 1
        sent = {"Authorization": f"Bearer {key}", "Idempotency-Key": f"k{self._keys}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        if content:
            sent |= {"Content-Type": "application/json"}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, content=content, headers=sent)

    def made(self, path: str, body: Any, key: str = TOKEN) -> dict[str, Any]:
        answer = self.ask("POST", path, key, body)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def key(self, *scopes: str, maker: str = TOKEN, **more: Any) -> str:
        return self.made("/api/keys", {"name": "k", "scopes": list(scopes), **more}, maker)["key"]

    def submit(self, key: str = TOKEN, **more: Any) -> str:
        return self.made("/api/runs", {"spec_toml": SPEC, "target": "box", **more}, key)["id"]

    def open_attempt(self, run: str) -> tuple[str, str]:
        """Do what the loop does before it starts a job; return the attempt's id and token."""

        def change(session: Any) -> str:
            view = next(view for view, _ in transitions.live(session) if view.id == run)
            transitions.open_attempt(session, view, view.attempt_n + 1, PREFIX, self.now[0])
            return session.scalars(sa.select(Attempt.id).where(Attempt.run == run, Attempt.state == "open")).one()

        attempt = asyncio.run(self.plane.store.write(change))
        return attempt, attempt_token(SECRET, attempt)

    def replica_runs(self) -> list[str]:
        """The runs that serve revisions."""
        asked = sa.select(Revision.replica)
        return list(asyncio.run(self.plane.store.read(lambda session: list(session.scalars(asked)))))

    def close_attempt(self, run: str, state: Any = "waiting") -> None:
        def change(session: Any) -> None:
            rows = [each for each in transitions.live(session) if each[0].id == run]
            (view, attempt), *_ = rows
            assert attempt is not None
            transitions.close(session, view, attempt, state, "closed by the test", 0, self.now[0])

        asyncio.run(self.plane.store.write(change))


def served(
    home: Path,
    database: str = "",
    requests_per_s: float = 0.0,
    online: Mapping[str, OnlineServer] | None = None,
    openid: Callable[[Callable[[bytes], bytes]], OpenIdProvider] | None = None,
) -> Served:
    store = Store(home / "data", database)
    now = [1_000_000]
    org = asyncio.run(store.write(lambda session: queries.make_org(session, "default", now[0]))).id
    rows = asyncio.run(store.read(all_keys))
    callers = Callers(TOKEN, SECRET, org, rows, lambda: now[0])

    async def offers() -> list[TargetInfo]:
        return [TargetInfo(name="box", kind="local", offers=[])]

    async def plan(body: PlanBody, target: TargetInfo) -> PlanInfo:
        return await asyncio.to_thread(plan_offers, body, target)

    woken: list[int] = []
    keys, prices = read_master_keys(home / "data", env={}), {"box": 2.0, "free": 0.0}
    mirror, audit = Mirror(home / "runs", store), AuditLog(SECRET, home / "data")
    shelf = Shelf(home / "packages", read_signer(home / "data"))
    plane = Plane(store, mirror, callers, keys, audit, lambda: now[0], prices, offers, plan, lambda: woken.append(1),
                  shelf, "test", online={} if online is None else online, kinds={"box": "local", "free": "ssh"},
                  openid=None if openid is None else openid(keys.digest))  # fmt: skip

    async def loop() -> None:
        await asyncio.Event().wait()

    app = create_app(
        control_service(plane, loop, requests_per_s=requests_per_s), token="", hosts=frozenset({"127.0.0.1"})
    )
    return Served(app, plane, org, now, woken)


def piece(file: str, generation: int, offset: int, data: bytes, **more: Any) -> Mapping[str, Any]:
    import base64

    sha256 = hashlib.sha256(data).hexdigest()
    return {
        "file": file, "generation": generation, "offset": offset, "data": base64.b64encode(data).decode(),
        "sha256": sha256, **more,
    }  # fmt: skip
