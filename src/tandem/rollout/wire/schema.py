"""Message types of the native wire form of groups, and their size limits."""

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
"""Groups in a body; siblings in a group; tokens of a group (in JSON: values of a group); bytes of a group's head."""

PREFIX = struct.Struct("<4sIQ")

Bytes: TypeAlias = bytes | memoryview
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class TrajectoryHeader(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A trajectory without its tokens. The fields are those of `tandem.types.Trajectory`."""

    reward: float
    spans: list[tuple[int, int]]
    status: TrajectoryStatus = "finished"
    metrics: dict[str, float] = {}
    shaping: float = 0.0
    advantages: list[float] = []
    """One per token, instead of the algorithm's."""
    thinking_tokens: int = 0
    unclosed: bool = False
    task_id: str = ""
    messages: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    """Free-form values of the producer; stored and returned."""


class SaidOfAll(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    environment: int | None = None
    """The id that registration returned."""
    ticket: int | None = None
    """The order of its ticket; None for a group played without a ticket."""
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
    """Bounds that the trainer and the environment registered for groups. 0 means no bound."""

    num_ids: int = 0
    """Size of the model's vocabulary; ids are below it."""
    max_tokens: int = 0
    """Most tokens of one trajectory, prompt included."""
    group_size: int = 0
    """Siblings of each group."""


@dataclass(frozen=True, slots=True)
class WireGroup:
    """A checked and encoded group, with values that the queue needs without decoding it."""

    frame: Bytes
    head: GroupHead
    size: int
    """Number of siblings."""
    tokens: int
    longest: int
    """Tokens of the longest trajectory."""
    max_id: int
    oldest: int
    """The lowest version of any token; NO_VERSION for recorded data."""
    newest: int
    unknown: int = 0
    """Sampled tokens of unknown version."""


_WHERE = re.compile(r"(.*?)(?: - at `\$(.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"field `([^`]*)`")


def decoded(decoder: Any, body: Bytes, field: str, whole: str = "groups") -> Any:
    """Decode a body; GroupRefused names the wrong field by a dotted path. `whole`: the name for errors without a path.
    msgspec writes paths as in `Expected `int`, got `str` - at `$.trajectories[0].ids[3]``."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise GroupRefused(field or whole, "is nested too deeply") from None
    except UnicodeDecodeError:
        raise GroupRefused(field or whole, "holds text that is not UTF-8") from None
    except msgspec.DecodeError as error:
        found = _WHERE.match(str(error))
        text, where = (found.group(1), found.group(2) or "") if found else (str(error), "")
        named = _NAMED.search(text)
        path = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", where).strip(".")
        raise GroupRefused(path_of(field, path, named.group(1) if named else "") or whole, text) from None


def path_of(*parts: str) -> str:
    return ".".join(part for part in parts if part)
