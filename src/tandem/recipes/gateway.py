"""`tandem gateway serve`: an OpenAI endpoint for any agent that records its conversations as trajectories."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from pathlib import Path

from tandem.build import standalone_engines
from tandem.errors import GroupRefused, NotKnown, SpecError
from tandem.io import atomic_write
from tandem.recipes.serve import find_model, load_model
from tandem.rollout.remote.client import ServiceClient
from tandem.rollout.sessions.sessions import Bounds
from tandem.rollout.sessions.store import Deliver, FinishedGroup, SessionStore
from tandem.serve.http.run import Listen, serve_forever
from tandem.spec.engine import HfEngineSpec

_PATIENCE_S = 20.0  # for one attempt; the gateway retries without limit


def serve_gateway(
    model: str | Path,
    listen: Listen,
    *,
    engine_url: str = "",
    engine_token_file: str | Path | None = None,
    thinking: bool = False,
    trajectories: str | Path | None = None,
    idle_s: float = 3600.0,
    rollouts: str = "",
    rollouts_token_file: str | Path | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. `model`: the model to serve; with `engine_url` only its tokenizer and chat
    template are used. Rewarded groups go to the rollout service `rollouts`, or become files in `trajectories`."""
    from tandem.serve.gateway import gateway_service
    from tandem.serve.http.service import create_app

    path, name, version = find_model(model, field="--model", weights=not engine_url)
    token = listen.token()  # first: it checks the data directory before a model is loaded
    if engine_url:
        if engine_token_file is None:
            raise SpecError(f"--engine-url = '{engine_url}': it needs a token; give its file by --engine-token-file")
        alone, name = standalone_engines.followed(engine_url, Path(engine_token_file), path, thinking=thinking)
    else:
        # Forward passes leave the event loop: HTTP must answer while the model works.
        loaded, engine = load_model(path, version, HfEngineSpec(), thinking=thinking, inline=False)
        alone = standalone_engines.Alone(engine, loaded.renderer, loaded.context, loaded.num_ids, loaded)
    directory = Path(trajectories or listen.data_dir / "trajectories")
    atomic_write.make_directory(directory, mode=atomic_write.PRIVATE)

    deliver = to_files(directory)
    if rollouts:
        if rollouts_token_file is None:
            raise SpecError(f"--rollouts = '{rollouts}': it needs a token; give its file by --rollouts-token-file")
        deliver = to_service(rollouts, Path(rollouts_token_file), owner=token, refused=deliver)
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
    serve_forever(create_app(service, token=token, hosts=listen.hosts), listen)


def to_files(directory: Path) -> Deliver:
    """Deliver each group as a file with one trajectory per line."""

    async def deliver(group: FinishedGroup) -> None:
        lines = b"".join(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in group.rows)
        await asyncio.to_thread(atomic_write.write_bytes, directory / f"{group.name}.jsonl", lines)

    return deliver


def to_service(url: str, token_file: Path, *, owner: str, refused: Deliver) -> Deliver:
    """Deliver to a rollout service. Idempotency keys derive from `owner`, so that a restarted gateway uses the
    same ones. A group that the service refuses goes to `refused` for inspection, and GroupRefused is raised."""
    environment: int | None = None
    registration_key = f"gateway-{hashlib.sha256(owner.encode()).hexdigest()[:32]}"
    registering = asyncio.Lock()

    async def put(client: ServiceClient, group: FinishedGroup) -> None:
        nonlocal environment, registration_key
        async with registering:
            if environment is None:
                environment = int(
                    (await client.post("/v2/environments", {"name": "gateway"}, key=registration_key))["id"]
                )
            registered = environment
        body = {"groups": [{"trajectories": group.rows, "extra": {"group": group.group}}]}
        try:
            await client.post(f"/v2/groups?environment={registered}", body, key=f"gateway-{group.name}")
        except NotKnown:  # another run began at the service
            if environment == registered:
                environment, registration_key = None, f"gateway-{uuid.uuid4().hex}"
            raise

    async def deliver(group: FinishedGroup) -> None:
        client = ServiceClient(url, token_file, patience_s=_PATIENCE_S, token_option="--rollouts-token-file")
        try:
            try:
                await put(client, group)
            except NotKnown:
                await put(client, group)
        except GroupRefused:
            await refused(group)
            raise
        finally:
            await client.close()

    return deliver
