"""The Atropos protocol over the rollout queue, without HTTP: translate Atropos calls to queue calls.

consumes: posts of groups, a registration, polls for batches      waits for: the disk (all), a batch's last byte
produces: batches of exactly `batch_size` sequences

Atropos clients send no leases, versions or keys, so this module derives them. A batch is a lease. The next fetch
acknowledges it if its last byte was sent; otherwise the next fetch returns the same batch. The version is the number of
acknowledged batches. Equal bodies within two minutes are one post, because clients resend after a timeout. Environment
ids start at 0 and continue over resets, so that a late post is not attributed to a newer environment.

For a native trainer a post is translated at once, and the gateway that the environment sampled from says which version
sampled each token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tandem.errors import GroupRefused, NotKnown, StoreError, StoreTimeout
from tandem.io import atomic_write
from tandem.io.request_key import RequestKey
from tandem.rollout.atropos import codec, field_support
from tandem.rollout.atropos.codec import Scored
from tandem.rollout.atropos.version_lookup import GatewayStamps
from tandem.rollout.queue.queue import RolloutQueue
from tandem.rollout.queue.types import Lease, RegisteredEnvironment, TrainerSpec
from tandem.rollout.wire.codec import WireGroup, encode

_log = logging.getLogger(__name__)

SAME_POST_S = 120.0
LAPSE_S = 60.0
"""Atropos environments ask for their status ten times a second."""
MIN_WEIGHT = 0.01
LEASE_S = 86400.0
"""Each status request renews it; it ends with the next fetch or registration."""
_INLINE_BYTES, _HASHED_INLINE_BYTES = 4 << 20, 1 << 20
_COUNTED_S = 0.1
_FIRST = 1  # the queue's first environment id; Atropos starts at 0
_NAMELESS = "nameless"


class TrainerRegistration(msgspec.Struct, frozen=True):
    """An Atropos trainer's registration."""

    batch_size: int
    max_token_len: int
    wandb_group: str = ""
    wandb_project: str = ""
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = -1
    starting_step: int = 0
    num_steps: int = -1


class AtroposRecords(msgspec.Struct):
    """State beyond the queue's, stored in `atropos.json`."""

    run: int = 0
    """Number of resets."""
    registration: TrainerRegistration | None = None
    epoch: int = 0
    started: bool = False
    """Whether a trainer has asked for a batch."""
    lease: int = 0
    groups: list[int] = []
    """Ids of the lease's groups."""
    step: int = 0
    """The step that acknowledging the lease completes."""
    handed_over: bool = False
    nameless: int = -1
    """The environment for posts that name none."""


@dataclass(frozen=True, slots=True)
class AtroposBatch:
    lease: int
    groups: tuple[bytes | memoryview, ...]
    """Each a JSON object."""
    sequences: int


class NotRegistered(StoreError):
    pass


class Atropos:
    """One per queue. Every call runs on one event loop."""

    def __init__(self, queue: RolloutQueue, directory: Path, gateway: GatewayStamps | None = None) -> None:
        self.queue, self._path = queue, directory / "atropos.json"
        self.records = (
            msgspec.json.decode(self._path.read_bytes(), type=AtroposRecords)
            if self._path.exists()
            else AtroposRecords()
        )
        self.counts = queue.stats.totals
        """This module adds `duplicate_posts`, `batches_again`, `tokens_stamped` and `tokens_unknown` (for a native
        trainer), `unstamped_posts` (the gateway did not answer), and `ignored_` with a field's name."""
        self._gateway = gateway
        self._odd_sequences: Counter[int] = Counter()
        """By environment: sequences in groups of another size than registered."""
        self._latest: bytes | None = None
        self._status_rows: tuple[float, list[dict[str, Any]]] = (-1.0, [])
        self._logged_why_no_batch = ""
        self._lock, self._writing = asyncio.Lock(), asyncio.Lock()
        self._handing_over = 0

    @property
    def step(self) -> int:
        return self.queue.version if self.trainer else 0

    @property
    def trainer(self) -> TrainerRegistration | None:
        """The registered trainer; a native one is described in Atropos terms."""
        spec = self.queue.trainer_spec
        if spec is None or self._is_atropos_trainer:
            return self.records.registration if spec else None
        size = max([1, *(int(self._spec(row).extra.get("group_size", 1)) for row in self._rows())])
        sequences = spec.sequences_per_step or spec.groups_per_step * size
        return TrainerRegistration(sequences, spec.max_tokens or -1, spec.run_id, "tandem", num_steps=2**31 - 1)

    @property
    def _is_atropos_trainer(self) -> bool:
        """Whether the trainer registered by this protocol and so fetches batches by it."""
        return self.queue.trainer_spec is not None and self.queue.trainer_spec.run_id == f"atropos-{self.records.run}"

    # --- registration

    async def register(self, registration: TrainerRegistration) -> None:
        """Register the trainer. A repeated registration is a restarted trainer: its unacknowledged groups return."""
        async with self._lock:
            handle = await self.queue.registration.register_trainer(
                TrainerSpec(
                    run_id=f"atropos-{self.records.run}",
                    sequences_per_step=registration.batch_size,
                    max_lag=-1,
                    version=max(self.step, registration.starting_step),
                    max_tokens=max(registration.max_token_len, 0),
                    max_dropped=0,
                    lease_s=LEASE_S,
                    extra={"atropos": msgspec.to_builtins(registration)},
                )
            )
            self.records.registration, self.records.epoch = registration, handle.epoch
            self.records.lease, self.records.groups, self.records.handed_over = 0, [], False
            await self.save()

    async def register_environment(
        self, name: str, *, weight: float, group_size: int, max_token_length: int, min_share: float
    ) -> tuple[int, str]:
        """Return the environment's id and unique name. NotRegistered until a trainer has asked for a batch."""
        if not self.trainer or (self._is_atropos_trainer and not self.records.started):
            raise NotRegistered("wait for trainer to start")
        name = name or "environment"
        plain = "e" * (not (name[0].isalnum() and name[0].isascii())) + re.sub(r"[^A-Za-z0-9._-]", "_", name[:100])
        taken = sum(row["min_share"] for row in self.queue.status()["environments"] if row["connected"])
        spec = RegisteredEnvironment(
            plain,
            weight=min(max(weight, 1e-3), 1e3) if weight > 0 else 1.0,  # -1 means: no weight of its own
            min_share=min(min_share, max(1.0 - taken, 0.0)),
            lapse_s=LAPSE_S,
            extra={"group_size": group_size, "max_token_length": max_token_length},
        )
        handle = await self.queue.registration.register_environment(spec)
        self.forget_counts()
        return handle.id - _FIRST, name + handle.name.removeprefix(plain)

    async def reset(self) -> None:
        """Clear everything that Atropos clients can see."""
        async with self._lock:
            await self.queue.registration.reset()
            self.records = AtroposRecords(run=self.records.run + 1)
            self.forget_counts()
            self._odd_sequences.clear()
            self._latest = None
            await self.save()

    def id_of(self, env_id: int) -> int:
        """Return the queue's id of an Atropos environment."""
        return env_id + _FIRST

    def _environment(self, env_id: int, field: str = "env_id") -> RegisteredEnvironment:
        try:
            return self.queue.environment_spec(self.id_of(env_id))
        except NotKnown:
            raise GroupRefused(field, f"{env_id}: no environment with this id is registered") from None

    async def _nameless(self) -> int:
        if self.records.nameless < 0:
            async with self._lock:
                if self.records.nameless < 0:
                    handle = await self.queue.registration.register_environment(
                        RegisteredEnvironment(_NAMELESS, lapse_s=LAPSE_S)
                    )
                    self.records.nameless = handle.id - _FIRST
                    await self.save()
        return self.records.nameless

    # --- posts

    async def post(self, body: bytes, *, many: bool) -> dict[str, Any]:
        """Store a post and return the reply to `/scored_data` or `/scored_data_list`."""
        in_executor = asyncio.get_running_loop().run_in_executor  # hashing releases the GIL; parsing mostly does not
        digesting = in_executor(None, _digest, body) if len(body) > _HASHED_INLINE_BYTES else None
        read = codec.read_list if many else _read_alone
        try:
            scored = await in_executor(None, read, body) if len(body) > _INLINE_BYTES else read(body)
            digest = _digest(body) if digesting is None else await digesting
            once = RequestKey(f"atropos-{self.records.run}-{many}-{digest}", b"", SAME_POST_S)
            if (before := await self.queue.answer(once)) is not None:
                self.counts["duplicate_posts"] += 1
                return {"status": "received", "groups_processed": len(before)} if many else {"status": "received"}
            return await self._put(scored, once, many=many)
        except GroupRefused as refused:
            await self.queue.environments.quarantine(None, refused.field, refused.text, body)
            raise

    async def _put(self, scored: Sequence[Scored], once: RequestKey, *, many: bool) -> dict[str, Any]:
        nameless = await self._nameless() if any(each.env_id is None for each in scored) else -1
        groups, odd = list[WireGroup](), list[tuple[int, int]]()
        for index, each in enumerate(scored):
            place = f"{index}." if many else ""
            env_id = nameless if each.env_id is None else each.env_id
            spec = self._environment(env_id, f"{place}env_id")
            self._check_fits(each, place)
            if each.size != spec.extra.get("group_size", each.size):
                odd.append((env_id, each.size))
            if self._is_atropos_trainer:
                groups.append(each.stored(self.step, self.id_of(env_id)))
            else:
                groups.append(await self._translate(each, self.id_of(env_id), place))
        if groups:
            await self.queue.environments.put(groups, once=once)
            self._latest = scored[-1].as_posted()
        for env_id, size in odd:
            self._odd_sequences[env_id] += size
        return self._reply(scored, odd, many=many)

    async def _translate(self, scored: Scored, environment: int, place: str) -> WireGroup:
        """Translate a post for a native trainer."""
        trainer = self.queue.trainer_spec
        field_support.check(scored.data, place)
        self.counts.update(f"ignored_{name}" for name in field_support.unused(scored.data))
        group, has_logprobs = codec.to_group(scored.data), scored.has_logprobs
        samplings = field_support.posted_samplings(scored.data)
        if self._gateway is not None:
            stamped = await self._gateway.stamp(group, has_logprobs=has_logprobs)
            group, has_logprobs, samplings = stamped.group, stamped.has_logprobs, samplings | stamped.samplings
            self.counts["unstamped_posts"] += not stamped.answered
            if not (has_logprobs or stamped.answered):
                raise StoreTimeout(
                    "this post has no logprobs, and the gateway, which has them, does not answer; send it again"
                )
        if not has_logprobs:
            raise GroupRefused(f"{place}inference_logprobs", field_support.NO_LOGPROBS)
        field_support.check_samplings(samplings, trainer.extra if trainer else {}, place)
        made = encode(group, environment=environment)
        self.counts["tokens_unknown"] += made.unknown
        self.counts["tokens_stamped"] += sum(each.num_trained for each in group) - made.unknown
        return made

    def _check_fits(self, scored: Scored, place: str) -> None:
        if (trainer := self.trainer) is None:
            return
        longest = max(lengths := scored.lengths)
        if 0 < trainer.max_token_len < longest:
            index, most = lengths.index(longest), trainer.max_token_len
            raise GroupRefused(f"{place}tokens.{index}", f"has {longest} tokens; max_token_len is {most}")
        if scored.size > trainer.batch_size:
            raise GroupRefused(
                f"{place}tokens", f"{scored.size} sequences never fit a batch of {trainer.batch_size} (batch_size)"
            )

    def _reply(self, scored: Sequence[Scored], odd: Sequence[tuple[int, int]], *, many: bool) -> dict[str, Any]:
        """Return Atropos's reply. `buffered`: the group has another size than registered; it is queued all the same."""
        size = self._buffered(odd[-1][0]) if odd else 0
        if not many:
            return {"status": "buffered", "buffer_size": size} if odd else {"status": "received"}
        reply: dict[str, Any] = {"status": "received", "groups_processed": len(scored)}
        return reply | ({"buffered": len(odd), "last_buffer_size": size} if odd else {})

    def _buffered(self, env_id: int) -> int:
        """Return what Atropos's own buffer would hold: sequences that do not fill a group of the registered size."""
        return self._odd_sequences[env_id] % max(int(self._environment(env_id).extra.get("group_size", 1)), 1)

    # --- batches

    async def batch(self) -> AtroposBatch | None:
        """Return a batch, or None while groups are too few. Acknowledge the one before, if it was sent in full."""
        registration = self.records.registration
        if registration is None or not self._is_atropos_trainer:
            raise NotRegistered("Trainer not registered. Call /register first.")
        async with self._lock:
            if self._handing_over:  # a client is reading it now, and may still disconnect
                return None
            if not self.records.started:
                self.records.started = True
                await self.save()
            if self.records.lease and not self.records.handed_over:
                return await self._same_batch()
            if self.records.lease:
                await self._acknowledge()
            lease = await self._take(registration.batch_size)
            if lease is None:
                return None
            self.records.lease, self.records.groups = lease.id, [each.id for each in lease.groups]
            self.records.step, self.records.handed_over = self.step + 1, False
            await self.save()
            return self._as_batch(lease.id, lease.groups)

    async def _take(self, sequences: int) -> Lease | None:
        """Take a lease. The key returns the same lease if this process died before it recorded the lease."""
        once = RequestKey(f"atropos-batch-{self.records.run}-{self.records.epoch}-{self.step}", b"")
        return await self.queue.trainer.take(self.records.epoch, sequences=sequences, once=once)

    def why_no_batch(self) -> str:
        """Say why a waiting trainer can never get a batch; empty if it can."""
        why = self.queue.why_no_batch
        if why and why != self._logged_why_no_batch:
            _log.warning("%s", why)
        self._logged_why_no_batch = why
        return why

    async def _same_batch(self) -> AtroposBatch:
        self.counts["batches_again"] += 1
        return self._as_batch(self.records.lease, [await self.queue.group(each) for each in self.records.groups])

    def _as_batch(self, lease: int, groups: Sequence[Any]) -> AtroposBatch:
        posted = tuple(codec.posted(each.frame, each.environment - _FIRST) for each in groups)
        return AtroposBatch(lease, posted, sum(each.size for each in groups))

    async def _acknowledge(self) -> None:
        """Acknowledge the batch. Each step may run twice, because this process may die between any two."""
        await self.queue.trainer.ack(
            self.records.epoch, groups=self.records.groups
        )  # also if the lease lapsed: it has them
        once = RequestKey(f"atropos-release-{self.records.run}-{self.records.lease}", b"")
        await self.queue.trainer.release(self.records.epoch, len(self.records.groups), once=once)
        await self.queue.trainer.announce_version(self.records.epoch, self.records.step)
        self.records.lease, self.records.groups, self.records.handed_over = 0, [], False
        await self.save()

    def handing_over(self, batch: AtroposBatch) -> None:
        self._handing_over = batch.lease

    async def handed_over(self, batch: AtroposBatch, yes: bool = True) -> None:
        """Record durably, before the last bytes are sent, that the trainer has all others. Call it with `yes` = False
        if the last bytes could not be sent after all."""
        if self.records.lease == batch.lease and self.records.handed_over != yes:
            self.records.handed_over = yes
            await self.save()

    def end_handing_over(self, batch: AtroposBatch) -> None:
        if self._handing_over == batch.lease:
            self._handing_over = 0

    @property
    def busy(self) -> bool:
        """Whether a batch is being sent to a trainer."""
        return self._handing_over != 0

    async def save(self) -> None:
        """Save the records, one write at a time; finish even if the caller is cancelled."""
        await asyncio.shield(self._write())

    async def _write(self) -> None:
        async with self._writing:
            await asyncio.to_thread(atomic_write.write_bytes, self._path, msgspec.json.encode(self.records))

    # --- status

    async def status(self) -> dict[str, Any]:
        if self.records.lease:
            with contextlib.suppress(StoreError):
                await self.queue.trainer.renew(self.records.epoch, self.records.lease)
        return {"current_step": self.step, "queue_size": self.queue.queued if self.trainer else 0}

    def environment_status(self, env_id: int) -> dict[str, Any]:
        spec = self._environment(env_id)
        self.queue.environments.heartbeat(self.id_of(env_id))
        rows = self._rows()
        mine = next(row for row in rows if row["id"] == self.id_of(env_id))
        live = [row for row in rows if row["connected"] and not row["silent"]]
        batch_size = self.trainer.batch_size if self.trainer else 0
        largest = max([1, *(row["largest"] for row in rows)])
        size = max(int(spec.extra.get("group_size", 1)), mine["largest"])
        others = sum(
            max(0, math.ceil(row["sequences"] / largest) * largest - int(batch_size * row["min_share"]))
            for row in rows
            if row is not mine
        )
        return {
            "current_step": self.step,
            "queue_size": (mine["sequences"] + others) // size,
            "unallocated_fraction": 1.0 - min(sum(row["min_share"] for row in live), 1.0),
            "self_queue_size": mine["sequences"] // size,
            "max_group_size": largest,
            "env_weight": max(MIN_WEIGHT, self._weight(env_id, live)),
        }

    def _weight(self, env_id: int, live: Sequence[dict[str, Any]]) -> float:
        """Return its sampling weight as Atropos computes it: by weight and by length."""
        mass = {
            row["id"]: row["weight"] * max(int(self._spec(row).extra.get("max_token_length", 1)), 1) for row in live
        }
        return mass.get(self.id_of(env_id), 0.0) / sum(mass.values()) if mass else 0.0

    def _spec(self, row: dict[str, Any]) -> RegisteredEnvironment:
        return self.queue.environment_spec(row["id"]) if row["connected"] else RegisteredEnvironment("")

    def _rows(self) -> list[dict[str, Any]]:
        """Return the status rows of all environments, computed at most ten times a second."""
        now = time.monotonic()
        if now - self._status_rows[0] > _COUNTED_S:
            self._status_rows = (now, self.queue.status()["environments"])
        return self._status_rows[1]

    def forget_counts(self) -> None:
        """Make the next status request compute its rows again."""
        self._status_rows = (-1.0, [])

    def latest(self) -> bytes | None:
        """Return the last group posted to this process."""
        return self._latest


def _read_alone(body: bytes) -> list[Scored]:
    return [codec.read_one(body)]


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
