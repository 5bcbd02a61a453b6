"""The Atropos protocol over the rollout queue: what its clients mean by their calls. No HTTP.

consumes: posts of groups, a registration, polls for batches      waits for: the disk (all), a batch's last byte
produces: batches of exactly `batch_size` sequences

Its clients say nothing of leases, versions or keys; these are derived. A batch is a lease that the next fetch
acknowledges, if the one before was handed over to its last byte: otherwise it is the same batch again. The version is
the number of batches acknowledged. Equal bytes within two minutes are one post: its clients send again what was not
answered in time. Its environments count from 0, and on over resets: a post that comes late is not taken for one of an
environment that came since.

For a trainer of ours a post is translated at once, and the gateway that its environment sampled from says which
version made each token.
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
from tandem.rollout.atropos import codec
from tandem.rollout.atropos import field_support as fit
from tandem.rollout.atropos.codec import Scored
from tandem.rollout.atropos.version_lookup import GatewayStamps
from tandem.rollout.queue.queue import RolloutQueue
from tandem.rollout.queue.types import Lease, RegisteredEnvironment, TrainerSpec
from tandem.rollout.wire.codec import WireGroup, encode

_log = logging.getLogger(__name__)

SAME_POST_S = 120.0
LAPSE_S = 60.0
"""Its environments ask for their status ten times a second."""
MIN_WEIGHT = 0.01
LEASE_S = 86400.0
"""Whoever asks for a status renews it; it ends with the next fetch, or with the next registration."""
_INLINE_BYTES, _HASHED_INLINE_BYTES = 4 << 20, 1 << 20
_COUNTED_S = 0.1
_FIRST = 1  # of the queue's environments
_NAMELESS = "nameless"


class TrainerRegistration(msgspec.Struct, frozen=True):
    """What a trainer registers."""

    batch_size: int
    max_token_len: int
    wandb_group: str = ""
    wandb_project: str = ""
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = -1
    starting_step: int = 0
    num_steps: int = -1


class AtroposRecords(msgspec.Struct):
    """What the queue does not know of, kept in a file of its own."""

    run: int = 0
    """Counts resets."""
    registration: TrainerRegistration | None = None
    epoch: int = 0
    started: bool = False
    """A trainer asked for a batch."""
    lease: int = 0
    groups: list[int] = []
    """Of the lease."""
    step: int = 0
    """That the lease makes once it is acknowledged."""
    handed_over: bool = False
    nameless: int = -1
    """The environment of those that name none."""


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
        self.notes = (
            msgspec.json.decode(self._path.read_bytes(), type=AtroposRecords)
            if self._path.exists()
            else AtroposRecords()
        )
        self.counts = queue.stats.totals
        """Of ours in it: `duplicate_posts`, `batches_again`, `tokens_stamped`, `tokens_unknown` (of those that a
        trainer of ours trains on), `unstamped_posts` (the gateway did not answer), `ignored_` and a field's name."""
        self._gateway = gateway
        self._odd: Counter[int] = Counter()
        """By environment: sequences in groups of another size than it registered."""
        self._latest: bytes | None = None
        self._counted: tuple[float, list[dict[str, Any]]] = (-1.0, [])
        self._told_why_no_batch = ""
        self._turn, self._writing = asyncio.Lock(), asyncio.Lock()
        self._handing_over = 0

    @property
    def step(self) -> int:
        return self.queue.version if self.trainer else 0

    @property
    def trainer(self) -> TrainerRegistration | None:
        """Whoever trains; one that speaks our own protocol is told of in the terms of this one."""
        spec = self.queue.trainer_spec
        if spec is None or self._is_ours:
            return self.notes.registration if spec else None
        size = max([1, *(int(self._spec(row).extra.get("group_size", 1)) for row in self._rows())])
        sequences = spec.sequences_per_step or spec.groups_per_step * size
        return TrainerRegistration(sequences, spec.max_tokens or -1, spec.run_id, "tandem", num_steps=2**31 - 1)

    @property
    def _is_ours(self) -> bool:
        """The trainer registered here, and batches are asked for here."""
        return self.queue.trainer_spec is not None and self.queue.trainer_spec.run_id == f"atropos-{self.notes.run}"

    # --- who takes part

    async def register(self, registration: TrainerRegistration) -> None:
        """Again: a trainer that was started again. What was handed to it and not acknowledged returns."""
        async with self._turn:
            seat = await self.queue.registration.register_trainer(
                TrainerSpec(
                    run_id=f"atropos-{self.notes.run}",
                    sequences_per_step=registration.batch_size,
                    max_lag=-1,
                    version=max(self.step, registration.starting_step),
                    max_tokens=max(registration.max_token_len, 0),
                    max_dropped=0,
                    lease_s=LEASE_S,
                    extra={"atropos": msgspec.to_builtins(registration)},
                )
            )
            self.notes.registration, self.notes.epoch = registration, seat.epoch
            self.notes.lease, self.notes.groups, self.notes.handed_over = 0, [], False
            await self._save()

    async def register_environment(
        self, name: str, *, weight: float, group_size: int, max_token_length: int, min_share: float
    ) -> tuple[int, str]:
        """Its id, and its name with a number. NotRegistered until a trainer has asked for a batch."""
        if not self.trainer or (self._is_ours and not self.notes.started):
            raise NotRegistered("wait for trainer to start")
        name = name or "environment"
        plain = "e" * (not (name[0].isalnum() and name[0].isascii())) + re.sub(r"[^A-Za-z0-9._-]", "_", name[:100])
        taken = sum(row["min_share"] for row in self.queue.status()["environments"] if row["connected"])
        spec = RegisteredEnvironment(
            plain,
            weight=min(max(weight, 1e-3), 1e3) if weight > 0 else 1.0,  # -1 is its way of saying: leave me out of this
            min_share=min(min_share, max(1.0 - taken, 0.0)),
            lapse_s=LAPSE_S,
            extra={"group_size": group_size, "max_token_length": max_token_length},
        )
        seat = await self.queue.registration.register_environment(spec)
        self.forget_counts()
        return seat.id - _FIRST, name + seat.name.removeprefix(plain)

    async def reset(self) -> None:
        """Wipes everything, as far as anybody who speaks this protocol can see."""
        async with self._turn:
            await self.queue.registration.reset()
            self.notes = AtroposRecords(run=self.notes.run + 1)
            self.forget_counts()
            self._odd.clear()
            self._latest = None
            await self._save()

    def id_of(self, env_id: int) -> int:
        """The queue's number of one of theirs."""
        return env_id + _FIRST

    def _environment(self, env_id: int, field: str = "env_id") -> RegisteredEnvironment:
        try:
            return self.queue.environment_spec(self.id_of(env_id))
        except NotKnown:
            raise GroupRefused(field, f"{env_id} is no environment that registered here") from None

    async def _nameless(self) -> int:
        if self.notes.nameless < 0:
            async with self._turn:
                if self.notes.nameless < 0:
                    seat = await self.queue.registration.register_environment(
                        RegisteredEnvironment(_NAMELESS, lapse_s=LAPSE_S)
                    )
                    self.notes.nameless = seat.id - _FIRST
                    await self._save()
        return self.notes.nameless

    # --- posts

    async def post(self, body: bytes, *, many: bool) -> dict[str, Any]:
        """The reply to `/scored_data` or `/scored_data_list`."""
        aside = asyncio.get_running_loop().run_in_executor  # hashing lets others run; reading, in the main, does not
        digesting = aside(None, _digest, body) if len(body) > _HASHED_INLINE_BYTES else None
        read = codec.read_list if many else _read_alone
        try:
            scored = await aside(None, read, body) if len(body) > _INLINE_BYTES else read(body)
            digest = _digest(body) if digesting is None else await digesting
            once = RequestKey(f"atropos-{self.notes.run}-{many}-{digest}", b"", SAME_POST_S)
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
            if self._is_ours:
                groups.append(each.stored(self.step, self.id_of(env_id)))
            else:
                groups.append(await self._translated(each, self.id_of(env_id), place))
        if groups:
            await self.queue.environments.put(groups, once=once)
            self._latest = scored[-1].as_posted()
        for env_id, size in odd:
            self._odd[env_id] += size
        return self._reply(scored, odd, many=many)

    async def _translated(self, scored: Scored, environment: int, place: str) -> WireGroup:
        """As a trainer of ours takes it."""
        trainer = self.queue.trainer_spec
        fit.check(scored.data, place)
        self.counts.update(f"ignored_{name}" for name in fit.unused(scored.data))
        group, has_logprobs = codec.to_group(scored.data), scored.has_logprobs
        samplings = fit.samplings_said(scored.data)
        if self._gateway is not None:
            stamped = await self._gateway.stamp(group, has_logprobs=has_logprobs)
            group, has_logprobs, samplings = stamped.group, stamped.has_logprobs, samplings | stamped.samplings
            self.counts["unstamped_posts"] += not stamped.answered
            if not (has_logprobs or stamped.answered):
                raise StoreTimeout("the gateway, which has the logprobs that this post lacks, does not answer")
        if not has_logprobs:
            raise GroupRefused(f"{place}inference_logprobs", fit.NO_LOGPROBS)
        fit.check_samplings(samplings, trainer.extra if trainer else {}, place)
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
        """`buffered`: of another size than registered. It is queued all the same, and combined when a batch is made."""
        size = self._buffered(odd[-1][0]) if odd else 0
        if not many:
            return {"status": "buffered", "buffer_size": size} if odd else {"status": "received"}
        reply: dict[str, Any] = {"status": "received", "groups_processed": len(scored)}
        return reply | ({"buffered": len(odd), "last_buffer_size": size} if odd else {})

    def _buffered(self, env_id: int) -> int:
        """What their buffer would hold: sequences that do not yet add up to a group of the registered size."""
        return self._odd[env_id] % max(int(self._environment(env_id).extra.get("group_size", 1)), 1)

    # --- batches

    async def batch(self) -> AtroposBatch | None:
        """None while there are not enough. Acknowledges the batch before, if that was handed over."""
        registration = self.notes.registration
        if registration is None or not self._is_ours:
            raise NotRegistered("Trainer not registered. Call /register first.")
        async with self._turn:
            if self._handing_over:  # somebody reads it at this moment; he may hang up yet
                return None
            if not self.notes.started:
                self.notes.started = True
                await self._save()
            if self.notes.lease and not self.notes.handed_over:
                return await self._again()
            if self.notes.lease:
                await self._acknowledge()
            lease = await self._take(registration.batch_size)
            if lease is None:
                return None
            self.notes.lease, self.notes.groups = lease.id, [each.id for each in lease.groups]
            self.notes.step, self.notes.handed_over = self.step + 1, False
            await self._save()
            return self._as_batch(lease.id, lease.groups)

    async def _take(self, sequences: int) -> Lease | None:
        """The key makes it the same lease when this process died before it noted which."""
        once = RequestKey(f"atropos-batch-{self.notes.run}-{self.notes.epoch}-{self.step}", b"")
        return await self.queue.trainer.take(self.notes.epoch, sequences=sequences, once=once)

    def why_no_batch(self) -> str:
        """For a trainer that waits: whether it waits in vain."""
        why = self.queue.why_no_batch
        if why and why != self._told_why_no_batch:
            _log.warning("%s", why)
        self._told_why_no_batch = why
        return why

    async def _again(self) -> AtroposBatch:
        self.counts["batches_again"] += 1
        return self._as_batch(self.notes.lease, [await self.queue.group(each) for each in self.notes.groups])

    def _as_batch(self, lease: int, groups: Sequence[Any]) -> AtroposBatch:
        posted = tuple(codec.posted(each.frame, each.environment - _FIRST) for each in groups)
        return AtroposBatch(lease, posted, sum(each.size for each in groups))

    async def _acknowledge(self) -> None:
        """In an order in which every part may happen twice: this process may die between any two."""
        await self.queue.trainer.ack(
            self.notes.epoch, groups=self.notes.groups
        )  # also if the lease lapsed: it has them
        once = RequestKey(f"atropos-release-{self.notes.run}-{self.notes.lease}", b"")
        await self.queue.trainer.release(self.notes.epoch, len(self.notes.groups), once=once)
        await self.queue.trainer.announce_version(self.notes.epoch, self.notes.step)
        self.notes.lease, self.notes.groups, self.notes.handed_over = 0, [], False
        await self._save()

    def handing_over(self, batch: AtroposBatch) -> None:
        self._handing_over = batch.lease

    async def handed_over(self, batch: AtroposBatch, yes: bool = True) -> None:
        """All but its last bytes are with the trainer; durable before these are sent. Not `yes`, should they not be
        sent after all, whatever became of the first note."""
        if self.notes.lease == batch.lease and self.notes.handed_over != yes:
            self.notes.handed_over = yes
            await self._save()

    def let_go(self, batch: AtroposBatch) -> None:
        if self._handing_over == batch.lease:
            self._handing_over = 0

    @property
    def busy(self) -> bool:
        """A batch is on its way to a trainer."""
        return self._handing_over != 0

    async def _save(self) -> None:
        """One after the other, each what holds by then; to its end, whatever becomes of the caller."""
        await asyncio.shield(self._write())

    async def _write(self) -> None:
        async with self._writing:
            await asyncio.to_thread(atomic_write.write_bytes, self._path, msgspec.json.encode(self.notes))

    # --- what can be asked

    async def status(self) -> dict[str, Any]:
        if self.notes.lease:
            with contextlib.suppress(StoreError):
                await self.queue.trainer.renew(self.notes.epoch, self.notes.lease)
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
        """Its part of the sampling, as theirs has it: by weight and by length."""
        mass = {
            row["id"]: row["weight"] * max(int(self._spec(row).extra.get("max_token_length", 1)), 1) for row in live
        }
        return mass.get(self.id_of(env_id), 0.0) / sum(mass.values()) if mass else 0.0

    def _spec(self, row: dict[str, Any]) -> RegisteredEnvironment:
        return self.queue.environment_spec(row["id"]) if row["connected"] else RegisteredEnvironment("")

    def _rows(self) -> list[dict[str, Any]]:
        """Of all environments; counted again at most ten times a second, however many ask."""
        now = time.monotonic()
        if now - self._counted[0] > _COUNTED_S:
            self._counted = (now, self.queue.status()["environments"])
        return self._counted[1]

    def forget_counts(self) -> None:
        """The next question is answered by counting."""
        self._counted = (-1.0, [])

    def latest(self) -> bytes | None:
        """The group that was posted last, as long as this process remembers."""
        return self._latest


def _read_alone(body: bytes) -> list[Scored]:
    return [codec.read_one(body)]


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
