"""The shapes of `tandem.rollout.wire.codec`: heads as they travel, groups as the queue handles them."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from tandem.errors import GroupRefused
from tandem.types import TrajectoryStatus

MAGIC = b"TGR1"
MAX_GROUPS, MAX_SIBLINGS, MAX_TOKENS, MAX_HEAD_BYTES = 4096, 4096, 2**22, 8 * 2**20
"""Of a body; of a group; of all trajectories of a group together (in JSON: values of a group); of what a group says
beside its tokens."""

PREFIX = struct.Struct("<4sIQ")

Bytes: TypeAlias = bytes | memoryview
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class TrajectoryHeader(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Of a trajectory, but for its tokens. The fields are those of `tandem.types.Trajectory`."""

    reward: float
    spans: list[tuple[int, int]]
    status: TrajectoryStatus = "finished"
    metrics: dict[str, float] = {}
    shaping: float = 0.0
    advantages: list[float] = []
    """Of each token, instead of the algorithm's."""
    thinking_tokens: int = 0
    unclosed: bool = False
    task_id: str = ""
    messages: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    """The producer's own; kept, and given back."""


class SaidOfAll(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    environment: int | None = None
    """The id that registration gave."""
    ticket: int | None = None
    """The order of the ticket that it was played on; none: it was played without asking."""
    extra: dict[str, Any] = {}


class TrajectoryHead(TrajectoryHeader):
    length: int


class GroupHead(SaidOfAll):
    trajectories: list[TrajectoryHead]


class TrajectoryJson(TrajectoryHeader):
    ids: list[int]
    logprobs: list[float]
    trained: list[int | bool]


class GroupJson(SaidOfAll):
    trajectories: list[TrajectoryJson]


@dataclass(frozen=True, slots=True)
class Rules:
    """What a group is held to by those who made it and who want it. 0 where there is no bound of that kind."""

    num_ids: int = 0
    """Ids are below it: the model's vocabulary."""
    max_tokens: int = 0
    """Of one trajectory, prompt included."""
    group_size: int = 0
    """Exactly so many siblings."""


@dataclass(frozen=True, slots=True)
class WireGroup:
    """A checked group, encoded, and what is worth knowing of it without decoding it again."""

    frame: Bytes
    head: GroupHead
    size: int
    """Siblings."""
    tokens: int
    longest: int
    """Tokens of the longest trajectory."""
    max_id: int
    oldest: int
    """The lowest version of any token; NO_VERSION where everything is recorded data."""
    newest: int
    unknown: int = 0
    """Tokens that something sampled, by an unknown version."""


_WHERE = re.compile(r"(.*?)(?: - at `\$(.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"field `([^`]*)`")


def decoded(decoder: Any, body: Bytes, field: str, whole: str = "groups") -> Any:
    """`whole`: the name of what has no name inside it. msgspec says where in a way of its own, which is not ours:
    `Expected `int`, got `str` - at `$.trajectories[0].ids[3]``."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise GroupRefused(field or whole, "nested too deep") from None
    except UnicodeDecodeError:
        raise GroupRefused(field or whole, "some text in it is not UTF-8") from None
    except msgspec.DecodeError as error:
        found = _WHERE.match(str(error))
        text, where = (found.group(1), found.group(2) or "") if found else (str(error), "")
        named = _NAMED.search(text)
        path = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", where).strip(".")
        raise GroupRefused(path_of(field, path, named.group(1) if named else "") or whole, text) from None


def path_of(*parts: str) -> str:
    return ".".join(part for part in parts if part)
