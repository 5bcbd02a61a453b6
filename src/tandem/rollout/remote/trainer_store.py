"""The trainer's store on a rollout service: take leases of groups from it and acknowledge them.

consumes: leases of groups       waits for: the service, and in it the oldest start
produces: groups, once each      unacknowledged groups return to the service when this process dies

A restart of the service costs only time. The store renews a lease until a checkpoint contains its groups.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tandem.errors import NotKnown, StoreError, StoreTimeout, TandemError
from tandem.io import atomic_write
from tandem.rollout.producer import group_metrics
from tandem.rollout.queue.types import Lease, TrainerSpec
from tandem.rollout.remote import lease_codec
from tandem.rollout.remote.client import ServiceClient
from tandem.rollout.wire import codec
from tandem.types import Group, Metrics, Ticket

_log = logging.getLogger(__name__)

_POLL_S, _LEAVE_S = 20.0, 5.0
_RUN_ID_FILE = "rollouts.json"

T = TypeVar("T")


def run_id_of(directory: Path, name: str) -> str:
    """Return the run's id at the service: unique for the run directory, and the same after a resume."""
    path = directory / _RUN_ID_FILE
    if not path.exists():
        atomic_write.write_json(path, {"run_id": f"{name[:100]}-{uuid.uuid4().hex[:12]}"})
    return json.loads(path.read_text(encoding="utf-8"))["run_id"]


class RemoteStore:
    """A RolloutStore, and the loop's Producer too: it renews leases, and reports metrics of the groups taken."""

    def __init__(
        self,
        client: ServiceClient,
        spec: TrainerSpec,
        version: Callable[[], int],
        *,
        take_timeout_s: float,
        fresh: bool,
    ) -> None:
        """`version`: returns the trainer's version. `fresh`: the service may drop the groups of another run."""
        self._client, self._spec, self._version, self._fresh = client, spec, version, fresh
        self._take_timeout_s = take_timeout_s
        self._epoch: int | None = None
        self._held: dict[int, set[int]] = {}
        """By lease: its unacknowledged groups."""
        self._acks_in_flight: set[int] = set()
        """Leases whose acknowledgement is in flight: the service may have closed them already."""
        self._ids: dict[int, tuple[int, int]] = {}
        """By `id()` of a taken group: its lease and its number."""
        self._contained: list[int] = []
        """Numbers of the groups in the checkpoint that this run resumed from: they must not be trained again."""
        self._taken: list[Group] = []
        self._lags: list[int] = []
        self._registering = asyncio.Lock()
        self._requests: set[asyncio.Future[Any]] = set()
        self._error: BaseException | None = None

    # --- RolloutStore

    async def admit(self) -> Ticket:
        raise StoreError("store: environments play for the rollout service; this trainer asks for no tickets")

    async def put(self, ticket: Ticket, group: Group) -> None:
        raise StoreError("store: environments post to the rollout service; this trainer has nothing to put")

    async def drop(self, ticket: Ticket, reason: str) -> None:
        raise StoreError("store: environments drop their tickets at the rollout service; this trainer has none")

    async def take(self, count: int) -> list[Group]:
        until = time.monotonic() + self._take_timeout_s
        epoch = await self._unless_failed(self._registered())
        while True:
            wait_s = min(_POLL_S, max(0.0, until - time.monotonic()))
            body = {"epoch": epoch, "groups": count, "version": self._version(), "wait_s": wait_s}
            request = self._client.post_for_bytes("/v2/leases", body, codec.BINARY, wait_s=wait_s)
            if content := await self._unless_failed(request):
                return self._decode(await asyncio.to_thread(lease_codec.decode_lease, content))
            if time.monotonic() >= until:
                raise StoreTimeout(
                    f"store: {self._client.url} had no {count} groups for {self._take_timeout_s:g} s "
                    "(train.group_timeout_s); `tandem rollouts top` shows the environments"
                )

    async def release(self, count: int) -> None:
        body = {"epoch": await self._registered(), "count": count, "version": self._version()}
        await self._unless_failed(self._client.post("/v2/release", body))

    async def ack(self, groups: Sequence[Group]) -> None:
        numbers = [self._ids.pop(id(group)) for group in groups]
        body = {"epoch": await self._registered(), "groups": [number for _, number in numbers]}
        self._acks_in_flight = {lease for lease, _ in numbers}
        await self._unless_failed(self._client.post("/v2/ack", body))
        self._acks_in_flight = set()
        for lease, number in numbers:
            self._held[lease].discard(number)
            if not self._held[lease]:
                del self._held[lease]

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        for request in self._requests:
            request.cancel()

    def state(self) -> dict[str, Any]:
        """Return the groups for a checkpoint: those taken and not acknowledged are trained by then."""
        return {"contained": [*self._contained, *(number for _, number in self._ids.values())]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._contained = list(state["contained"])

    # --- Producer

    async def run(self) -> None:
        """Renew leases for ever. StoreError if one lapsed: the service hands its groups out again, so this run must not
        train on them."""
        while True:
            epoch = await self._registered()
            await asyncio.sleep(self._spec.lease_s / 4)
            for lease in list(self._held):
                await self._renew(lease, epoch)

    async def close(self) -> None:
        """Unregister, so that this run or another may register at once. If the service does not answer, it keeps the
        registration until the leases lapse."""
        try:
            if self._epoch is not None:
                async with asyncio.timeout(_LEAVE_S):
                    await self._client.post("/v2/trainer/leave", {"epoch": self._epoch})
        except (TandemError, TimeoutError) as error:
            _log.info("could not unregister at %s: %s", self._client.url, error)
        finally:
            await self._client.close()

    def drain_metrics(self) -> Metrics:
        groups, self._taken = self._taken, []
        lags, self._lags = self._lags, []
        lag = {"lag/service_mean": sum(lags) / len(lags)} if lags else {}
        return lag | group_metrics(groups)

    # --- registration

    async def _registered(self) -> int:
        async with self._registering:
            if self._epoch is None:
                spec = self._spec
                body = {
                    "run_id": spec.run_id, "groups_per_step": spec.groups_per_step, "max_lag": spec.max_lag,
                    "version": self._version(), "num_ids": spec.num_ids, "max_tokens": spec.max_tokens,
                    "tokenizer": spec.tokenizer, "max_dropped": spec.max_dropped, "lease_s": spec.lease_s,
                    "fresh": self._fresh, "extra": dict(spec.extra),
                }  # fmt: skip
                await self._client.check_service()
                reply = await self._client.post("/v2/trainer", body)
                epoch = int(reply["epoch"])
                if self._contained:  # before a new lease: the killed process held them, and they returned to the queue
                    await self._client.post("/v2/ack", {"epoch": epoch, "groups": self._contained})
                    self._contained = []
                self._epoch = epoch
                _log.info("registered at %s as run '%s', epoch %d", self._client.url, spec.run_id, self._epoch)
            return self._epoch

    async def _renew(self, lease: int, epoch: int) -> None:
        try:
            await self._client.post(f"/v2/leases/{lease}/renew", {"epoch": epoch})
        except NotKnown as error:
            if lease in self._held.keys() - self._acks_in_flight:  # otherwise it was acknowledged meanwhile
                raise StoreError(f"store: {error}; was this process stopped?") from error

    def _decode(self, lease: Lease) -> list[Group]:
        held = {number for _, number in self._ids.values()}
        if again := [taken.id for taken in lease.groups if taken.id in held]:
            raise StoreError(
                f"store: {self._client.url} handed out groups {again[:8]} again, which this run has trained on: their "
                "lease lapsed; was this process stopped?"
            )
        groups = [codec.decode(taken.frame) for taken in lease.groups]
        for group, taken in zip(groups, lease.groups, strict=True):
            self._ids[id(group)] = (lease.id, taken.id)
        self._held[lease.id] = {taken.id for taken in lease.groups}
        self._taken += groups
        self._lags += [taken.lag for taken in lease.groups]
        return groups

    async def _unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        if self._error is not None:
            work.close()
            raise self._error
        request = asyncio.ensure_future(work)
        self._requests.add(request)
        try:
            return await request
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._error is not None and not (task and task.cancelling()):
                raise self._error from None
            raise
        finally:
            self._requests.discard(request)
