"""`tandem online serve`: a model answers requests, and learns from what it is told, in one server of two halves."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.io import atomic
from tandem.io.model_source import refuse_missing
from tandem.online.child import TrainerProcess
from tandem.online.conductor import Conductor
from tandem.online.jobs import JobStore
from tandem.online.memory import JobMemory
from tandem.recipes import build_online
from tandem.recipes.export_online import keep_spec
from tandem.rollout.session_store import SessionStore
from tandem.serve.run import Listen, serve_forever
from tandem.spec.online import OnlineSpec, as_online_spec

_TRAINER = (sys.executable, "-m", "tandem.recipes.online_trainer")


def serve_online(spec: OnlineSpec | Mapping[str, Any] | str | Path, listen: Listen) -> None:
    """Until SIGTERM or Ctrl-C. All state is in the listener's data directory: named again, the server goes on with
    the version that was published last."""
    from tandem.inside.sources import open_source
    from tandem.serve.app import create_app
    from tandem.serve.online import online_service
    from tandem.serve.online_keys import KeyRing, Keys
    from tandem.serve.online_past import Past

    spec = as_online_spec(spec)
    refuse_missing(spec.model)
    build_online.held_out_rows(spec)  # what is wrong with files is better said before anything starts
    build_online.ordinary_prompts(spec)
    token = listen.token()
    keep_spec(spec, listen.data_dir)
    store = JobStore(listen.data_dir / "jobs")
    log = listen.data_dir / "trainer.log"
    environment = {"OMP_NUM_THREADS": str(spec.trainer_threads)}
    versions = atomic.make_directory(listen.data_dir / "versions", mode=atomic.PRIVATE)
    waiting = [TrainerProcess(_TRAINER, log, environment)]  # it starts while the engine is built
    alone = build_online.alone(spec, listen.data_dir)
    conductor = Conductor(
        spec,
        store,
        alone.engine,
        open_source,
        lambda: waiting.pop() if waiting else TrainerProcess(_TRAINER, log, environment),
        versions,
        JobMemory(spec.replay, spec.seed, store, spec.train.batch_size),
        build_online.ordinary(spec, alone, listen.data_dir),
        build_online.revival(alone),
    )
    sessions = SessionStore(listen.data_dir / "sessions")
    service = online_service(
        conductor,
        alone.renderer,
        sessions,
        Past(build_online.past(spec, alone, versions)),
        model_id=spec.name,
        context=alone.context,
        num_ids=alone.num_ids,
    )
    app = create_app(service, token=token, hosts=listen.hosts)
    app.add_middleware(KeyRing, keys=Keys.of(listen.data_dir, token))
    serve_forever(app, listen)


def default_data_dir() -> Path:
    return Path(".tandem") / "online"
