"""The gateway: an OpenAI endpoint for any agent, which records what it does as trajectories."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tandem.errors import SpecError
from tandem.io import atomic
from tandem.recipes import build_engine
from tandem.recipes.serve import find_model, load_model
from tandem.rollout.session_store import Leaving, SessionStore
from tandem.rollout.sessions import Bounds
from tandem.serve.run import Listen, serve_forever
from tandem.spec.engine import HfEngineSpec


def serve_gateway(
    model: str,
    listen: Listen,
    *,
    engine_url: str = "",
    engine_token_file: Path | None = None,
    thinking: bool = False,
    trajectories: Path | None = None,
    idle_s: float = 3600.0,
) -> None:
    """Until SIGTERM or Ctrl-C. `model`: what answers, or with `engine_url` the tokenizer and chat template of what
    answers there. Groups that were rewarded become files in `trajectories`."""
    from tandem.serve.app import create_app
    from tandem.serve.gateway import gateway_service, rows_as_lines

    path, name, version = find_model(model)
    if engine_url:
        if engine_token_file is None:
            raise SpecError(f"--engine-url = '{engine_url}': it asks for a token; say where with --engine-token-file")
        alone, name = build_engine.followed(engine_url, engine_token_file, path, thinking=thinking)
    else:
        # Forward passes leave the event loop: HTTP must answer while the model works.
        loaded, engine = load_model(path, version, HfEngineSpec(), thinking=thinking, inline=False)
        alone = build_engine.Alone(engine, loaded.renderer, loaded.context, loaded.num_ids, loaded)
    directory = trajectories or listen.data_dir / "trajectories"
    directory.mkdir(parents=True, exist_ok=True)

    async def deliver(group: Leaving) -> None:
        await asyncio.to_thread(atomic.write_bytes, directory / f"{group.name}.jsonl", rows_as_lines(group))

    service = gateway_service(
        alone.engine,
        alone.renderer,
        SessionStore(listen.data_dir / "sessions"),
        deliver,
        model_id=name,
        context=alone.context,
        num_ids=alone.num_ids,
        bounds=Bounds(idle_s=idle_s),
    )
    serve_forever(create_app(service, token=listen.token(), hosts=listen.hosts), listen)
