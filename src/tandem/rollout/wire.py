"""The native wire form of a group: what a producer may send, checked once, and kept as it came.

A body of type `application/x-tandem-groups` is one frame after another, and a frame is one group:

    b"TGR1"  u32 size of the head  u64 size of the buffers        little endian
    head                                                          msgpack, a `GroupHead`
    ids       int32[N]                                            N: tokens of all trajectories, one after another
    logprobs  float32[N]                                          0 where nothing was sampled
    trained   uint8[N]                                            1 where the loss counts, else 0

The JSON form is `GroupJson`: the same heads, with `ids`, `logprobs` and `trained` in each trajectory. It is stored as
a frame. Versions travel as spans, `[[version, tokens], ...]`; -1 is a token that no policy sampled.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np

from tandem.errors import GroupRefused
from tandem.types import NO_VERSION, Group, Trajectory, TrajectoryStatus

BINARY = "application/x-tandem-groups"
MAGIC = b"TGR1"
_PREFIX = struct.Struct("<4sIQ")
_TOKEN_BYTES = 9
_MAX_HEAD_BYTES = 8 * 2**20
_MAX_VERSION = 2**53


class TrajectoryHead(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A trajectory but for its tokens. The fields are those of `tandem.types.Trajectory`."""

    length: int
    reward: float
    spans: list[tuple[int, int]]
    status: TrajectoryStatus = "finished"
    metrics: dict[str, float] = {}
    shaping: float = 0.0
    thinking_tokens: int = 0
    unclosed: bool = False
    task_id: str = ""
    messages: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    """The producer's own; kept, and given back."""


class GroupHead(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    trajectories: list[TrajectoryHead]
    environment: int | None = None
    """The id that registration gave."""
    ticket: int | None = None
    """The order of the ticket that it was played on; none: it was played without asking."""
    inferred: bool = False
    """Versions were not stamped where tokens were made, but guessed from when they arrived."""
    extra: dict[str, Any] = {}


class TrajectoryJson(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    ids: list[int]
    logprobs: list[float]
    trained: list[int | bool]
    spans: list[tuple[int, int]]
    reward: float
    status: TrajectoryStatus = "finished"
    metrics: dict[str, float] = {}
    shaping: float = 0.0
    thinking_tokens: int = 0
    unclosed: bool = False
    task_id: str = ""
    messages: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}


class GroupJson(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    trajectories: list[TrajectoryJson]
    environment: int | None = None
    ticket: int | None = None
    inferred: bool = False
    extra: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Rules:
    """What a group is held to. 0 where there is no bound of that kind."""

    num_ids: int = 0
    """Ids are below it: the model's vocabulary."""
    max_tokens: int = 0
    """Of one trajectory, prompt included."""
    group_size: int = 0
    """Exactly so many siblings."""
    max_group_size: int = 4096


@dataclass(frozen=True, slots=True)
class WireGroup:
    """A checked group, encoded; what the queue keeps in memory of it is `size`, `tokens`, `oldest` and `newest`."""

    frame: bytes | memoryview
    head: GroupHead
    size: int
    """Siblings."""
    tokens: int
    oldest: int
    """The lowest version of a trained token; NO_VERSION where every trained token is recorded data."""
    newest: int


def read_frames(body: bytes | memoryview, *, max_groups: int = 4096) -> list[WireGroup]:
    """Every frame of a body, checked for all that needs no rules; GroupRefused with the field otherwise."""
    raise NotImplementedError


def read_json(body: bytes | memoryview, *, max_groups: int = 4096) -> list[WireGroup]:
    """The same of JSON: one group, or `{"groups": [...]}`."""
    raise NotImplementedError


def check(group: WireGroup, rules: Rules) -> None:
    """What depends on who sends it to whom: vocabulary, length, group size."""
    raise NotImplementedError


def encode(group: Group, **head: Any) -> WireGroup:
    """A frame of our own trajectories. `head`: environment, ticket, inferred, extra."""
    raise NotImplementedError


def decode(frame: bytes | memoryview) -> Group:
    """What a trainer trains on."""
    raise NotImplementedError


def to_json(frame: bytes | memoryview) -> dict[str, Any]:
    """As `GroupJson`, for whoever reads JSON."""
    raise NotImplementedError
