"""The native wire form of a lease: groups that the service hands to a trainer.

    b"TLS1"  u32 size of the head                little endian
    head                                         msgpack, a `LeaseHead`
    frames                                       one for each of the head's groups, as in `tandem.rollout.wire.codec`

In JSON a lease is `{"lease", "version", "seconds", "groups": [{"id", "order", "environment", "lag", "group"}]}`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from tandem.errors import GroupRefused
from tandem.rollout.atropos import codec as atropos_codec
from tandem.rollout.queue.types import Lease, Taken
from tandem.rollout.wire import codec

MAGIC = b"TLS1"
_PREFIX = struct.Struct("<4sI")


class TakenHead(msgspec.Struct, array_like=True):
    id: int
    order: int
    environment: int
    size: int
    tokens: int
    lag: int
    bytes: int
    """Size of its frame."""


class LeaseHead(msgspec.Struct):
    lease: int
    version: int
    seconds: float
    groups: list[TakenHead]


class GroupInLease(msgspec.Struct):
    id: int
    order: int
    environment: int
    lag: int
    group: msgspec.Raw
    """A `GroupJson`."""


class LeaseJson(msgspec.Struct):
    lease: int
    version: int
    seconds: float
    groups: list[GroupInLease]


_HEAD = msgspec.msgpack.Decoder(LeaseHead)


def encode_lease(lease: Lease) -> bytes:
    frames = [atropos_codec.native(e.frame, e.environment) for e in lease.groups]
    groups = [
        TakenHead(e.id, e.order, e.environment, e.size, e.tokens, e.lag, len(frame))
        for e, frame in zip(lease.groups, frames, strict=True)
    ]
    head = msgspec.msgpack.encode(LeaseHead(lease.id, lease.version, lease.seconds, groups))
    return b"".join((_PREFIX.pack(MAGIC, len(head)), head, *frames))


def decode_lease(body: codec.Bytes) -> Lease:
    view = memoryview(body)
    if len(view) < _PREFIX.size or bytes(view[:4]) != MAGIC:
        raise GroupRefused("lease", f"a lease begins with {MAGIC!r}")
    start = _PREFIX.size + _PREFIX.unpack_from(view)[1]
    head = _HEAD.decode(view[_PREFIX.size : start])
    groups: list[Taken] = []
    for e in head.groups:
        frame = bytes(view[start : start + e.bytes])
        groups.append(Taken(e.id, e.order, e.environment, e.size, e.tokens, e.lag, frame))
        start += e.bytes
    if start != len(view):
        raise GroupRefused("lease", f"the head gives {start} bytes, but the body has {len(view)}")
    return Lease(head.lease, head.version, head.seconds, tuple(groups))


def lease_to_json(lease: Lease) -> bytes:
    return msgspec.json.encode(LeaseJson(lease.id, lease.version, lease.seconds, groups_to_json(lease.groups)))


def groups_to_json(groups: Sequence[Taken]) -> list[GroupInLease]:
    return [
        GroupInLease(e.id, e.order, e.environment, e.lag, _group_to_json(atropos_codec.native(e.frame, e.environment)))
        for e in groups
    ]


def _group_to_json(frame: codec.Bytes) -> msgspec.Raw:
    """Encode one trajectory at a time: encoding holds the GIL, and a batch may be a hundred megabytes."""
    group = codec.to_json(frame)
    siblings = [msgspec.Raw(msgspec.json.encode(each)) for each in group.trajectories]
    head = {"environment": group.environment, "ticket": group.ticket, "extra": group.extra}
    return msgspec.Raw(msgspec.json.encode({"trajectories": siblings, **head}))
