"""`tandem online serve`: serve a model and train it from its users' samples; one process serves, another trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.build import online
from tandem.io import atomic_write
from tandem.io.chat_feedback import ChatStore
from tandem.io.model_path_check import refuse_missing
from tandem.online.job_store import JobStore
from tandem.online.orchestrator import Orchestrator
from tandem.online.sample_replay import ReplayMemory
from tandem.online.trainer_supervisor import TrainerProcess
from tandem.recipes.online_export import keep_spec
from tandem.rollout.sessions.store import SessionStore
from tandem.serve.http.run import Listen, serve_forever
from tandem.spec.online import OnlineSpec, as_online_spec

_TRAINER = (sys.executable, "-m", "tandem.recipes.online_trainer_process")


def serve_online(spec: OnlineSpec | Mapping[str, Any] | str | Path, listen: Listen) -> None:
    """Serve until SIGTERM or Ctrl-C. All state is in the listener's data directory: a server that is restarted on it
    serves the active version."""
    from tandem.serve.http.service import create_app
    from tandem.serve.online.keys import KeyRing, Keys
    from tandem.serve.online.past_versions import PastVersions
    from tandem.serve.online.service import online_service
    from tandem.vllm_worker.weight_sources import open_source

    spec = as_online_spec(spec)
    refuse_missing(spec.model)
    online.held_out_rows(spec)  # a bad file is reported before anything slow starts
    online.ordinary_prompts(spec)
    token = listen.token()
    keep_spec(spec, listen.data_dir)
    store = JobStore(listen.data_dir / "jobs")
    log = listen.data_dir / "trainer.log"
    environment = {"OMP_NUM_THREADS": str(spec.trainer_threads)}
    versions = atomic_write.make_directory(listen.data_dir / "versions", mode=atomic_write.PRIVATE)
    prestarted = [TrainerProcess(_TRAINER, log, environment)]  # it imports torch while the engine is built
    alone = online.alone(spec, listen.data_dir)
    orchestrator = Orchestrator(
        spec,
        store,
        alone.engine,
        open_source,
        lambda: prestarted.pop() if prestarted else TrainerProcess(_TRAINER, log, environment),
        versions,
        ReplayMemory(spec.replay, spec.seed, store, spec.train.batch_size),
        online.ordinary(spec, alone, listen.data_dir),
        online.revival(alone),
    )
    sessions = SessionStore(listen.data_dir / "sessions")
    service = online_service(
        orchestrator,
        alone.renderer,
        sessions,
        PastVersions(online.past(spec, alone, versions)),
        model_id=spec.name,
        context=alone.context,
        num_ids=alone.num_ids,
        chats=ChatStore(listen.data_dir) if spec.feedback else None,
    )
    app = create_app(service, token=token, hosts=listen.hosts)
    app.add_middleware(KeyRing, keys=Keys.of(listen.data_dir, token))
    serve_forever(app, listen)


def default_data_dir() -> Path:
    return Path(".tandem") / "online"
