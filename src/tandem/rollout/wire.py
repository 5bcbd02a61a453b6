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
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

from tandem.errors import GroupRefused
from tandem.types import NO_VERSION, Group, Trajectory, TrajectoryStatus

BINARY = "application/x-tandem-groups"
MAGIC = b"TGR1"
MAX_GROUPS, MAX_SIBLINGS, MAX_TOKENS, MAX_HEAD_BYTES = 4096, 4096, 2**22, 8 * 2**20
"""Of a body; of a group; of all trajectories of a group together (in JSON: values of a group); of what a group says
beside its tokens."""

_PREFIX = struct.Struct("<4sIQ")
_TOKEN_BYTES = 9
_MAX_VERSION, _MAX_NAME, _MAX_METRICS, _MAX_DEPTH = 2**53, 1024, 256, 16
_AT_ONCE = 4 * 2**20
_ABOVE_CERTAIN = 0.01  # how far rounding may lift a logprob over 0

Bytes: TypeAlias = bytes | memoryview
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


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


# --- reading


def read_frames(body: Bytes, *, max_groups: int = MAX_GROUPS) -> list[WireGroup]:
    """Every frame of a body, checked for all that needs no rules; GroupRefused with the field otherwise."""
    view, found = memoryview(body), list[WireGroup]()
    while len(view):
        field = f"groups.{len(found)}"
        if len(found) == max_groups:
            raise GroupRefused("groups", f"more than {max_groups} in one post")
        group = _read_frame(view, field)
        found.append(group)
        view = view[len(group.frame) :]
    if not found:
        raise GroupRefused("groups", "there is none")
    return found


def read_json(body: Bytes, *, max_groups: int = MAX_GROUPS) -> list[WireGroup]:
    """The same of JSON, `{"groups": [...]}`: each group becomes a frame."""
    small = len(body) <= _AT_ONCE  # of a large body one group at a time: lists take many times the room of their text
    groups = decoded(_SMALL_POST if small else _POST, body, "").groups
    if not 1 <= len(groups) <= max_groups:
        raise GroupRefused("groups", f"{len(groups)} in one post; 1 to {max_groups} are taken")
    return [
        _from_json(each if small else _unpacked(each, f"groups.{number}"), f"groups.{number}")
        for number, each in enumerate(groups)
    ]


def check(group: WireGroup, rules: Rules, field: str = "") -> None:
    """What depends on who sends it to whom."""
    if rules.num_ids and group.max_id >= rules.num_ids:
        unknown = _buffers(group)[0] >= rules.num_ids
        raise _at_fault(group.head, unknown, field, "ids", f"id {group.max_id}, but the model has {rules.num_ids}")
    if rules.max_tokens and group.longest > rules.max_tokens:
        number = next(k for k, each in enumerate(group.head.trajectories) if each.length > rules.max_tokens)
        raise GroupRefused(
            _path(field, f"trajectories.{number}.ids"), f"{group.longest} tokens, but {rules.max_tokens} is the most"
        )
    if rules.group_size and group.size != rules.group_size:
        raise GroupRefused(
            _path(field, "trajectories"), f"{group.size} siblings, but this environment registered {rules.group_size}"
        )


# --- writing and decoding


def encode(group: Group, **head: Any) -> WireGroup:
    """A frame of our own trajectories. `head`: environment, ticket, inferred, extra."""
    heads = [
        TrajectoryHead(
            length=len(each.ids),
            reward=float(each.reward),
            spans=spans_of(each.versions),
            status=each.status,
            metrics=each.metrics,
            shaping=each.shaping,
            thinking_tokens=each.thinking_tokens,
            unclosed=each.unclosed,
            task_id=each.task_id,
            messages=[dict(message) for message in each.messages],
        )
        for each in group
    ]
    for number, each in enumerate(group):
        if not len(each.ids) == len(each.logprobs) == len(each.trained) == len(each.versions):
            raise GroupRefused(f"trajectories.{number}", "ids, logprobs, trained and versions differ in length")
    return assemble(
        GroupHead(heads, **head),
        [each.ids for each in group],
        [each.logprobs for each in group],
        [each.trained for each in group],
    )


def decode(frame: Bytes) -> Group:
    """What a trainer trains on."""
    group = _read_frame(memoryview(frame), "")
    parts = [_split(group.head, buffer) for buffer in _buffers(group)]
    return [
        Trajectory(
            ids=ids.tolist(),
            trained=trained.astype(bool).tolist(),
            logprobs=logprobs.tolist(),
            versions=[version for version, count in head.spans for _ in range(count)],
            reward=head.reward,
            status=head.status,
            metrics=head.metrics,
            shaping=head.shaping,
            thinking_tokens=head.thinking_tokens,
            unclosed=head.unclosed,
            task_id=head.task_id,
            messages=list(head.messages),
        )
        for head, ids, logprobs, trained in zip(group.head.trajectories, *parts, strict=True)
    ]


def to_json(frame: Bytes) -> GroupJson:
    """For whoever reads JSON: `msgspec.json.encode` writes it."""
    group = _read_frame(memoryview(frame), "")
    parts = [_split(group.head, buffer) for buffer in _buffers(group)]
    trajectories = [
        TrajectoryJson(
            ids=ids.tolist(),
            logprobs=logprobs.tolist(),
            trained=trained.tolist(),
            **{name: getattr(head, name) for name in _SAID},
        )
        for head, ids, logprobs, trained in zip(group.head.trajectories, *parts, strict=True)
    ]
    head = group.head
    return GroupJson(trajectories, head.environment, head.ticket, head.inferred, head.extra)


def assemble(
    head: GroupHead,
    ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    trained: Sequence[Sequence[int | bool]],
    field: str = "",
) -> WireGroup:
    """A checked frame from lists, one for each trajectory; their lengths are the head's."""
    ids_N = _array(ids, np.int64, field, "ids")
    trained_N = _array(trained, np.int64, field, "trained")
    with np.errstate(over="ignore"):  # what a float32 cannot hold becomes infinite, and is refused as such
        logprobs_N = _array(logprobs, np.float64, field, "logprobs").astype("<f4")
    for number, each in enumerate(_split(head, ids_N)):
        if each.size and not 0 <= int(each.min()) <= int(each.max()) < 2**31:
            raise GroupRefused(_path(field, f"trajectories.{number}.ids"), "an id is negative, or above 2^31 - 1")
    for number, each in enumerate(_split(head, trained_N)):
        if each.size and not 0 <= int(each.min()) <= int(each.max()) <= 1:
            raise GroupRefused(_path(field, f"trajectories.{number}.trained"), "only 0 and 1 (or false and true)")
    encoded = msgspec.msgpack.encode(head)
    buffers = ids_N.astype("<i4").tobytes() + logprobs_N.tobytes() + trained_N.astype(np.uint8).tobytes()
    frame = b"".join((_PREFIX.pack(MAGIC, len(encoded), len(buffers)), encoded, buffers))
    return _read_frame(memoryview(frame), field)


def _array(lists: Sequence[Sequence[float]], kind: type[np.generic], field: str, name: str) -> Array:
    try:
        return np.array(list(chain.from_iterable(lists)), kind)
    except (OverflowError, TypeError, ValueError) as error:
        for number, each in enumerate(lists):
            try:
                np.array(each, kind)
            except (OverflowError, TypeError, ValueError):
                raise GroupRefused(_path(field, f"trajectories.{number}.{name}"), str(error)) from None
        raise


def spans_of(versions: Sequence[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    start = 0
    for end in range(1, len(versions) + 1):
        if end == len(versions) or versions[end] != versions[start]:
            spans.append((versions[start], end - start))
            start = end
    return spans


# --- one frame


class _Post(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[msgspec.Raw]


class _SmallPost(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[GroupJson]


_POST = msgspec.json.Decoder(_Post)
_SMALL_POST = msgspec.json.Decoder(_SmallPost)
_GROUP_JSON = msgspec.json.Decoder(GroupJson)
_GROUP_HEAD = msgspec.msgpack.Decoder(GroupHead)
_SAID = [name for name in TrajectoryHead.__struct_fields__ if name != "length"]
_WHERE = re.compile(r"(.*?)(?: - at `\$(.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"field `([^`]*)`")


def _read_frame(view: memoryview, field: str) -> WireGroup:
    if len(view) < _PREFIX.size:
        raise GroupRefused(field, f"the body ends after {len(view)} bytes of a frame's beginning")
    magic, head_bytes, buffer_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise GroupRefused(field, f"a frame begins with {MAGIC!r}, not {bytes(magic)!r}")
    end = _PREFIX.size + head_bytes + buffer_bytes
    if head_bytes > MAX_HEAD_BYTES or end > len(view):
        raise GroupRefused(
            field,
            f"the frame says {head_bytes} + {buffer_bytes} bytes; {len(view) - _PREFIX.size} follow, and a head has "
            f"{MAX_HEAD_BYTES} at most",
        )
    head: GroupHead = decoded(_GROUP_HEAD, view[_PREFIX.size : _PREFIX.size + head_bytes], field)
    tokens, longest, oldest, newest = _check_head(head, field)
    if buffer_bytes != tokens * _TOKEN_BYTES:
        raise GroupRefused(
            _path(field, "trajectories"),
            f"lengths add up to {tokens} tokens, and the buffers hold {buffer_bytes / 9:g}",
        )
    frame = view[:end]
    max_id = _check_buffers(head, *_arrays(frame, head_bytes, tokens), field)
    return WireGroup(frame, head, len(head.trajectories), tokens, longest, max_id, oldest, newest)


def _check_head(head: GroupHead, field: str) -> tuple[int, int, int, int]:
    """Tokens, the longest trajectory's, the oldest version and the newest."""
    if not 1 <= len(head.trajectories) <= MAX_SIBLINGS:
        raise GroupRefused(_path(field, "trajectories"), f"{len(head.trajectories)}; 1 to {MAX_SIBLINGS} are taken")
    for name, number in (("environment", head.environment), ("ticket", head.ticket)):
        if number is not None and not 0 <= number < _MAX_VERSION:
            raise GroupRefused(_path(field, name), f"{number} is none")
    if head.extra:
        _check_plain(head.extra, _path(field, "extra"))
    tokens = longest = 0
    oldest, newest = _MAX_VERSION, NO_VERSION
    for number, each in enumerate(head.trajectories):
        _check_trajectory(each, field, number)
        tokens += each.length
        longest = max(longest, each.length)
        for version, _ in each.spans:
            if version >= 0:
                oldest, newest = min(oldest, version), max(newest, version)
    if tokens > MAX_TOKENS:
        raise GroupRefused(_path(field, "trajectories"), f"{tokens} tokens; {MAX_TOKENS} is the most of a group")
    return tokens, longest, oldest if newest >= 0 else NO_VERSION, newest


def _check_trajectory(head: TrajectoryHead, field: str, number: int) -> None:
    def refuse(name: str, text: str) -> GroupRefused:
        return GroupRefused(_path(field, f"trajectories.{number}.{name}"), text)

    if head.length < 1:
        raise refuse("ids", "no tokens")
    if not math.isfinite(head.reward):
        raise refuse("reward", f"{head.reward} is no number to learn from")
    if not math.isfinite(head.shaping):
        raise refuse("shaping", f"{head.shaping} is no number to learn from")
    if any(count < 1 or not NO_VERSION <= version < _MAX_VERSION for version, count in head.spans):
        raise refuse("spans", "each is [version, tokens], with a version of -1 or above and at least one token")
    if (spanned := sum(count for _, count in head.spans)) != head.length:
        raise refuse("spans", f"they cover {spanned} tokens of {head.length}")
    if not 0 <= head.thinking_tokens <= head.length:
        raise refuse("thinking_tokens", f"{head.thinking_tokens} of {head.length} tokens")
    if len(head.task_id) > _MAX_NAME:
        raise refuse("task_id", f"longer than {_MAX_NAME} characters")
    if head.metrics:
        if len(head.metrics) > _MAX_METRICS or any(len(name) > _MAX_NAME for name in head.metrics):
            raise refuse("metrics", f"more than {_MAX_METRICS}, or a name of more than {_MAX_NAME} characters")
        if not all(map(math.isfinite, head.metrics.values())):
            raise refuse("metrics", "a value is not finite")
    if head.messages:
        _check_plain(head.messages, _path(field, f"trajectories.{number}.messages"))
    if head.extra:
        _check_plain(head.extra, _path(field, f"trajectories.{number}.extra"))


def _check_plain(value: Any, field: str, depth: int = 0) -> None:
    """JSON can say it: no NaN, no bytes, no dates, and not deeper than a person would nest it."""
    if depth > _MAX_DEPTH:
        raise GroupRefused(field, f"nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict):
        for key, each in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                raise GroupRefused(field, f"the key {key!r} is no text")
            _check_plain(each, field, depth + 1)
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            _check_plain(each, field, depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise GroupRefused(field, f"{value} is no number")
    elif value is not None and not isinstance(value, str | int):
        raise GroupRefused(field, f"{type(value).__name__} has no JSON")


def _arrays(frame: Bytes, head_bytes: int, tokens: int) -> tuple[Array, Array, Array]:
    start = _PREFIX.size + head_bytes
    ids = np.frombuffer(frame, "<i4", tokens, start)
    logprobs = np.frombuffer(frame, "<f4", tokens, start + 4 * tokens)
    return ids, logprobs, np.frombuffer(frame, np.uint8, tokens, start + 8 * tokens)


def _buffers(group: WireGroup) -> tuple[Array, Array, Array]:
    return _arrays(group.frame, _PREFIX.unpack_from(group.frame)[1], group.tokens)


def _split(head: GroupHead, buffer: Array) -> list[Array]:
    ends = np.cumsum([each.length for each in head.trajectories])
    return np.split(buffer, ends[:-1])


def _check_buffers(head: GroupHead, ids: Array, logprobs: Array, trained: Array, field: str) -> int:
    """The largest id. All at once; which trajectory it was is asked only if there is something to refuse."""
    low, high = float(logprobs.min()), float(logprobs.max())  # NaN is contagious: it would be both
    max_id = int(ids.max())
    if ids.min() < 0:
        raise _at_fault(head, ids < 0, field, "ids", "an id is negative")
    if not (math.isfinite(low) and math.isfinite(high)):
        raise _at_fault(head, ~np.isfinite(logprobs), field, "logprobs", "one is not finite")
    if high > _ABOVE_CERTAIN:
        raise _at_fault(head, logprobs > _ABOVE_CERTAIN, field, "logprobs", f"{high:g}: above 0 it is none")
    if trained.max() > 1:
        raise _at_fault(head, trained > 1, field, "trained", "only 0 and 1")
    if not trained.any():
        raise GroupRefused(_path(field, "trajectories.0.trained"), "no token of the group is trained")
    _check_stamps(head, trained, field)
    return max_id


def _at_fault(head: GroupHead, wrong: Array, field: str, name: str, text: str) -> GroupRefused:
    """In the first trajectory in which something is wrong."""
    number = next(number for number, part in enumerate(_split(head, wrong)) if part.any())
    return GroupRefused(_path(field, f"trajectories.{number}.{name}"), text)


def _check_stamps(head: GroupHead, trained: Array, field: str) -> None:
    """Staleness cannot be judged of a token without a version."""
    start = 0
    for number, each in enumerate(head.trajectories):
        if each.status == "recorded":
            start += each.length
            continue
        for version, count in each.spans:
            if version < 0 and trained[start : start + count].any():
                raise GroupRefused(
                    _path(field, f"trajectories.{number}.spans"),
                    "a trained token has no version: stamp it where it is sampled, or say status = 'recorded'",
                )
            start += count


def _unpacked(raw: msgspec.Raw, field: str) -> GroupJson:
    # Every value but the last has a comma behind it: what lists of them would take is known before they are made.
    if (values := bytes(raw).count(b",")) > MAX_TOKENS:
        raise GroupRefused(field, f"{values} values; send a group of this size in the binary form")
    return decoded(_GROUP_JSON, raw, field)


def _from_json(group: GroupJson, field: str) -> WireGroup:
    for number, each in enumerate(group.trajectories):
        for name in ("logprobs", "trained"):
            if len(getattr(each, name)) != len(each.ids):
                raise GroupRefused(
                    _path(field, f"trajectories.{number}.{name}"),
                    f"{len(getattr(each, name))} values for {len(each.ids)} ids",
                )
    heads = [
        TrajectoryHead(length=len(each.ids), **{name: getattr(each, name) for name in _SAID})
        for each in group.trajectories
    ]
    return assemble(
        GroupHead(heads, group.environment, group.ticket, group.inferred, group.extra),
        [each.ids for each in group.trajectories],
        [each.logprobs for each in group.trajectories],
        [each.trained for each in group.trajectories],
        field,
    )


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
        raise GroupRefused(_path(field, path, named.group(1) if named else "") or whole, text) from None


def _path(*parts: str) -> str:
    return ".".join(part for part in parts if part)
