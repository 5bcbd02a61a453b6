"""`tandem env serve`: play an environment for a rollout service."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from tandem.build import standalone_engines, training
from tandem.build.judges import judge_model
from tandem.errors import EngineError, SpecError
from tandem.recipes.packages import ready_packages
from tandem.recipes.serve import find_model
from tandem.rollout.episode import Setting
from tandem.rollout.producer import EnvironmentProducer
from tandem.rollout.queue.types import RegisteredEnvironment
from tandem.rollout.remote.client import ServiceClient
from tandem.rollout.remote.environment_store import TicketStore
from tandem.spec.environment import EnvironmentSpec, JudgeSpec, NoJudge
from tandem.spec.load import plain_message
from tandem.types import Sampling

_log = logging.getLogger(__name__)

_ENGINE_AGAIN_S = 1.0
_LEAVE_S = 5.0


def serve_environment(
    name: str | Path,
    params: Mapping[str, Any] | None = None,
    *,
    rollouts: str,
    token_file: str | Path,
    engine: str,
    engine_token_file: str | Path,
    model: str | Path,
    group_size: int = 8,
    sampling: Sampling | None = None,
    thinking: bool = False,
    workers: int = 0,
    most_groups: int = 16,
    weight: float = 1.0,
    min_share: float = 0.0,
    seed: int = 0,
    episode_timeout_s: float = 60.0,
    max_failed_share: float = 0.2,
    engine_deadline_s: float = 120.0,
    judge: JudgeSpec | None = None,
    sandbox: bool = False,
    sandbox_network: bool = False,
    sandbox_read: Sequence[str] = (),
    sandbox_write: Sequence[str] = (),
) -> None:
    """Play until SIGTERM or Ctrl-C. `model`: its tokenizer and chat template must be those of the model at `engine`.
    `sandbox`: play in bubblewrap, as `[environment]` does; a package always does. Service and engine may restart;
    episodes in progress on a lost engine are dropped, and others are played."""
    if sandbox and not workers:
        raise SpecError("--sandbox: needs worker processes; add --workers, as in --workers 8")
    tables = {
        "name": str(name), "params": dict(params or {}), "episode_timeout_s": episode_timeout_s,
        "max_failed_share": max_failed_share, "judge": judge or NoJudge(),
        "sandbox_network": sandbox_network, "sandbox_read": sandbox_read, "sandbox_write": sandbox_write,
        **({"workers": workers} if workers else {}), **({"sandbox": "bwrap"} if sandbox else {}),
    }  # fmt: skip
    try:
        spec = EnvironmentSpec.model_validate(tables)
    except ValidationError as error:
        raise SpecError(plain_message(error.errors(include_url=False)[0])) from None
    client = ServiceClient(rollouts, Path(token_file), url_option="--rollouts", token_option="--token-file")
    with ready_packages(spec) as packages:
        environment = training.environment(spec, packages.installed if packages else None)
    try:
        if opened := getattr(environment, "sandbox", ""):
            _log.info("sandbox: %s", opened)
        path, _, _ = find_model(model, field="--model", weights=False)
        alone, _ = standalone_engines.followed(engine, Path(engine_token_file), path, thinking=thinking)
        setting = Setting(
            environment, alone.engine, alone.renderer, sampling or Sampling(), alone.context, engine_deadline_s,
            episode_timeout_s, judge=judge_model(spec.judge, alone.engine, alone.renderer, alone.context),
            retries=1 if spec.workers else 0,
        )  # fmt: skip
        registration = RegisteredEnvironment(
            _short(spec.name), weight, min_share, group_size, tokenizer=alone.renderer.fingerprint
        )
        asyncio.run(_until_stopped(setting, client, registration, most_groups, seed, max_failed_share))
    finally:
        training.close(environment)


def _short(name: str) -> str:
    """`words` for path/to/words.py:Words, `Words` for package.module:Words, `Pong-v5` for gymnasium:ALE/Pong-v5."""
    source, _, last = name.rpartition(":")
    file = source if source.endswith(".py") else last
    short = Path(file).stem if file.endswith(".py") else file.rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", short).lstrip("._-")[:128] or "environment"


async def _until_stopped(
    setting: Setting,
    client: ServiceClient,
    registration: RegisteredEnvironment,
    most_groups: int,
    seed: int,
    max_failed_share: float,
) -> None:
    store = TicketStore(client, registration, most_under_way=most_groups)
    producer = EnvironmentProducer(
        setting, store, lambda _: True, group_size=registration.group_size, seed=seed, max_failed_share=max_failed_share
    )
    playing = asyncio.ensure_future(_play(producer, store, client))
    alive = asyncio.create_task(store.keep_alive())
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread: the caller handles signals
            asyncio.get_running_loop().add_signal_handler(number, playing.cancel)
    try:
        await playing
    except asyncio.CancelledError:
        _log.info("stopped: %d groups posted, %d dropped", store.put_groups, store.dropped.total())
    except ExceptionGroup as failed:
        first: Exception = failed  # several tasks end together; report the first cause
        while isinstance(first, ExceptionGroup):
            first = cast("ExceptionGroup[Exception]", first).exceptions[0]
        raise first from None
    finally:
        alive.cancel()
        with suppress(TimeoutError, Exception):  # if the service cannot be reached, its registration lapses
            async with asyncio.timeout(_LEAVE_S):
                await store.leave()
        training.close(setting.environment)
        await setting.engine.close()
        await client.close()


async def _play(producer: EnvironmentProducer, store: TicketStore, client: ServiceClient) -> None:
    """Play until cancelled. An environment that fails too often raises; a lost engine does not."""
    await client.check_service()
    while True:
        try:
            await producer.run()
        except* EngineError as errors:
            _log.warning("the engine: %s; episodes in progress are dropped", errors.exceptions[0])
        await store.drop_all("engine")
        await asyncio.sleep(_ENGINE_AGAIN_S)
