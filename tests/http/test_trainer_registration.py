"""The trainer's registration at a rollout service: errors name the reason, and it is removed when the trainer ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rollouts_served import RolloutClient, serving_rollouts

from tandem.errors import Conflict, Fenced
from tandem.loop import _supervised  # pyright: ignore[reportPrivateUsage]
from tandem.rollout.queue.types import TrainerSpec
from tandem.rollout.remote.client import ServiceClient
from tandem.rollout.remote.trainer_store import RemoteStore

TRAJECTORY = {"ids": [7, 8], "logprobs": [0, -0.5], "trained": [0, 1], "spans": [[-1, 1], [0, 1]], "reward": 1}


def trainer(tmp_path: Path, client: RolloutClient, run_id: str, *, fresh: bool = False) -> RemoteStore:
    spec = TrainerSpec(run_id, groups_per_step=1, max_lag=1)
    asked = ServiceClient(client.url, tmp_path / "data" / "token", patience_s=5)
    return RemoteStore(asked, spec, lambda: 0, take_timeout_s=5, fresh=fresh)


def put(client: RolloutClient, *rewards: float) -> None:
    environment = client.post("/v2/environments", {"name": "env"})["id"]
    for reward in rewards:
        group = {"environment": environment, "trajectories": [TRAJECTORY | {"reward": reward}]}
        client.post("/v2/groups", {"groups": [group]})


async def registered(store: RemoteStore, client: RolloutClient, run_id: str) -> int:
    """Return its epoch, once the service knows of it."""
    renewing = asyncio.create_task(store.run())
    async with asyncio.timeout(5):
        while (told := client.get("/v2/status")["trainer"]) is None or told["run_id"] != run_id:
            await asyncio.sleep(0.01)
    renewing.cancel()
    return told["epoch"]


def test_a_trainer_that_the_service_refuses_ends_with_the_reason(tmp_path: Path):
    async def scenario(client: RolloutClient) -> None:
        client.post("/v2/trainer", {"run_id": "first", "groups_per_step": 1})
        store = trainer(tmp_path, client, "second")
        producing = _supervised(store.run(), "producer", store)
        with pytest.raises(Conflict, match="this service holds groups of run 'first'"):
            await store.take(1)
        await asyncio.gather(producing, return_exceptions=True)
        with pytest.raises(Conflict, match="this service holds groups of run 'first'"):
            await store.take(1)
        await store.close()

    _served(tmp_path, scenario)


def test_a_trainer_that_ends_gives_its_seat_and_its_groups_back_at_once(tmp_path: Path):
    async def scenario(client: RolloutClient) -> None:
        first = trainer(tmp_path, client, "first")
        epoch = await registered(first, client, "first")
        put(client, 1, 2)
        await first.take(1)
        early = trainer(tmp_path, client, "second", fresh=True)
        with pytest.raises(Conflict, match="run 'first' is registered and holds groups under lease"):
            await early.take(1)
        await early.close()
        await first.close()
        late = ServiceClient(client.url, tmp_path / "data" / "token", patience_s=5)
        with pytest.raises(Fenced):
            await late.post("/v2/release", {"epoch": epoch, "count": 1})
        await late.close()
        again = trainer(tmp_path, client, "first")
        assert [group[0].reward for _ in range(2) for group in await again.take(1)] == [1, 2]
        await again.close()
        second = trainer(tmp_path, client, "second", fresh=True)
        await registered(second, client, "second")
        await second.close()

    _served(tmp_path, scenario)


def _served(tmp_path: Path, scenario: Any) -> None:
    with serving_rollouts(tmp_path / "data") as client:
        asyncio.run(scenario(client))
