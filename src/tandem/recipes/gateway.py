"""The gateway: an OpenAI endpoint for any agent, which records what it does as trajectories."""

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
from tandem.rollout.sessions.store import Deliver, Leaving, SessionStore
from tandem.serve.http.run import Listen, serve_forever
from tandem.spec.engine import HfEngineSpec

_PATIENCE_S = 20.0  # for one attempt; attempts have no end


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
    """Until SIGTERM or Ctrl-C. `model`: what answers, or with `engine_url` the tokenizer and chat template of what
    answers there. Groups that were rewarded go to the rollout service `rollouts`, or become files in `trajectories`."""
    from tandem.serve.gateway import gateway_service
    from tandem.serve.http.service import create_app

    path, name, version = find_model(model, field="--model", weights=not engine_url)
    token = listen.token()  # before anything else is put into its data directory, and before a model is loaded
    if engine_url:
        if engine_token_file is None:
            raise SpecError(f"--engine-url = '{engine_url}': it asks for a token; say where with --engine-token-file")
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
            raise SpecError(f"--rollouts = '{rollouts}': it asks for a token; say where with --rollouts-token-file")
        deliver = to_service(rollouts, Path(rollouts_token_file), whose=token, refused=deliver)
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
    """A group a file, a trajectory a line."""

    async def deliver(group: Leaving) -> None:
        lines = b"".join(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in group.rows)
        await asyncio.to_thread(atomic_write.write_bytes, directory / f"{group.name}.jsonl", lines)

    return deliver


def to_service(url: str, token_file: Path, *, whose: str, refused: Deliver) -> Deliver:
    """To a rollout service, under keys that a later process of the same gateway uses, too: `whose` names it. What the
    service refuses for good goes to `refused`, so that it can be looked at, and is raised."""
    seat: int | None = None
    seat_key = f"gateway-{hashlib.sha256(whose.encode()).hexdigest()[:32]}"
    sitting_down = asyncio.Lock()

    async def put(client: ServiceClient, group: Leaving) -> None:
        nonlocal seat, seat_key
        async with sitting_down:
            if seat is None:
                seat = int((await client.post("/v2/environments", {"name": "gateway"}, key=seat_key))["id"])
            taken = seat
        body = {"groups": [{"trajectories": group.rows, "extra": {"group": group.group}}]}
        try:
            await client.post(f"/v2/groups?environment={taken}", body, key=f"gateway-{group.name}")
        except NotKnown:  # the service restarted with an empty queue
            if seat == taken:
                seat, seat_key = None, f"gateway-{uuid.uuid4().hex}"
            raise

    async def deliver(group: Leaving) -> None:
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
