"""The trainer's store on a rollout service: its run id, and groups that it must not train on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from queue_rig import RUN, group

from tandem.errors import StoreError
from tandem.rollout.queue.types import Lease, Taken
from tandem.rollout.remote import lease_codec
from tandem.rollout.remote.trainer_store import RemoteStore, run_id_of


def test_two_run_directories_of_one_name_are_two_runs_and_a_resume_is_the_same(tmp_path: Path):
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = (run_id_of(tmp_path / name, "far") for name in "ab")
    assert first != second
    assert first.startswith("far-")
    assert run_id_of(tmp_path / "a", "far") == first


class _Service:
    """Hands out the same group in every lease."""

    url = "http://there"

    def __init__(self) -> None:
        self.leases = 0

    async def check_service(self) -> None:
        pass

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        return {"epoch": 1}

    async def post_for_bytes(self, path: str, body: Any, accept: str, *, wait_s: float = 0.0) -> bytes:
        self.leases += 1
        frame = bytes(group().frame)
        return bytes(lease_codec.encode_lease(Lease(self.leases, 0, 600.0, (Taken(7, 1, 1, 2, 8, 0, frame),))))


def test_a_group_that_is_handed_out_again_before_its_checkpoint_ends_the_run():
    async def scenario() -> None:
        service: Any = _Service()
        store = RemoteStore(service, RUN, lambda: 0, take_timeout_s=1, fresh=False)
        taken = await store.take(1)
        with pytest.raises(StoreError, match=r"groups \[7\] again"):
            await store.take(1)
        await store.ack(taken)

    asyncio.run(scenario())
