"""A control plane in a process of its own: `agent_plane.py DIRECTORY PORT`. Its one target is this machine."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import uvicorn

from tandem.build.targets import open_provider
from tandem.control import queries
from tandem.control.api.requests import Plane
from tandem.control.api.service import control_service
from tandem.control.callers import Callers, all_keys
from tandem.control.decide import AttemptView
from tandem.control.mirror import Mirror
from tandem.control.reconcile import Reconciler
from tandem.control.store import Store
from tandem.control.tokens import attempt_secret, attempt_token
from tandem.providers.machine import LocalSettings
from tandem.serve.http.service import create_app
from tandem.shapes.agent import TOKEN_VARIABLE
from tandem.shapes.runs import TargetInfo
from tandem.types import Job, Need

TOKEN = "operators-token"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def main(home: Path, port: int) -> None:
    store, secret = Store(home / "data"), attempt_secret(home / "data")
    org = asyncio.run(store.write(lambda session: queries.make_org(session, "default", now_ms()))).id
    settings = LocalSettings(
        directory=str(home / "jobs"), tandem=str(home / "tandem"), pass_env=("PYTHONPATH", "OMP_NUM_THREADS")
    )

    def job_of(attempt: AttemptView) -> Job:
        url = f"http://127.0.0.1:{port}/api/attempts/{attempt.id}"
        env = {TOKEN_VARIABLE: attempt_token(secret, attempt.id)}
        return Job(attempt.name, (settings.tandem, "agent", url), Need(cpus=0), env=env)

    async def offers() -> list[TargetInfo]:
        return []

    loop = Reconciler(store, {"here": open_provider(settings)}, job_of, prefix="tandem-t-", clock=now_ms)
    callers = Callers(TOKEN, secret, org, asyncio.run(store.read(all_keys)), now_ms)
    plane = Plane(store, Mirror(home / "mirrors", store), callers, now_ms, {"here": 0.0}, offers, loop.wake)
    app = create_app(control_service(plane, loop.run, loop.close), token="", hosts=frozenset({"127.0.0.1"}))
    uvicorn.run(app, port=port, log_level="warning")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
