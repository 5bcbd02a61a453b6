"""Serve what a run made, or any model: over HTTP, or in the terminal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tandem.errors import RunError
from tandem.protocols import Engine
from tandem.recipes import build
from tandem.serve.chat import chat_loop
from tandem.serve.run import Listen, serve_forever
from tandem.spec.engine import EngineSpec, HfEngineSpec
from tandem.spec.model import PathModel
from tandem.spec.precision import Float32Precision
from tandem.types import Sampling


def serve_model(source: str, listen: Listen, spec: EngineSpec | None = None, *, thinking: bool = False) -> None:
    """Until SIGTERM or Ctrl-C."""
    from tandem.serve.app import create_app
    from tandem.serve.openai import openai_service

    path, name, version = find_model(source)
    # Forward passes leave the event loop: HTTP must answer while the model works.
    model, engine = _load(path, version, spec or HfEngineSpec(), thinking=thinking, inline=False)
    service = openai_service(engine, model.renderer, model_id=name, context=model.context, num_ids=model.num_ids)
    serve_forever(create_app(service, token=listen.token(), hosts=listen.hosts), listen)


def chat_with(
    source: str, *, temperature: float = 0.0, max_tokens: int = 512, system: str = "", thinking: bool = False
) -> None:
    """Talk to a model in the terminal, until /exit."""
    path, _, version = find_model(source)
    model, engine = _load(path, version, HfEngineSpec(), thinking=thinking, inline=True)

    async def talk() -> None:
        sampling = Sampling(max_tokens=min(max_tokens, model.context // 2), temperature=temperature)
        try:
            await chat_loop(engine, model.renderer, context=model.context, sampling=sampling, system=system)
        finally:
            await engine.close()

    asyncio.run(talk())


def default_data_dir(source: str) -> Path:
    return Path(source) / "serve" if (Path(source) / "status.json").exists() else Path(".tandem") / "serve"


def find_model(source: str) -> tuple[str, str, int]:
    """Path or hub id, the name to serve it under, and the version of its weights."""
    path = Path(source)
    if not (path / "status.json").exists():
        return source, path.name or source, 0
    export = path / "export"
    if not export.exists():
        raise RunError(f"{path}: this run has no export/, because it did not end well; see {path / 'status.json'}")
    status = json.loads((path / "status.json").read_text(encoding="utf-8"))
    return str(export), path.name, int(status.get("steps_done", 0))


def _load(path: str, version: int, spec: EngineSpec, *, thinking: bool, inline: bool) -> tuple[build.Model, Engine]:
    device = build.pick_device("auto")
    model = build.model(PathModel(path=path, thinking=thinking), Float32Precision(), 0, device, spec.max_context)
    engine, bridge = build.engine(spec, model, deterministic=inline), build.inproc_bridge()

    async def publish() -> None:
        await engine.attach(bridge.source(spec.replicas))
        bridge.send(model.policy.weights(version, "live"))
        await engine.load(version)

    asyncio.run(publish())
    return model, engine
