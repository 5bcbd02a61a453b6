"""Encode and decode groups in the native wire form. A received group is checked once and stored as its bytes.

A body of type `application/x-tandem-groups` is one frame after another, and a frame is one group:

    b"TGR1"  u32 size of the head  u64 size of the buffers        little endian
    head                                                          msgpack, a `GroupHead`
    ids       int32[N]                                            N: tokens of all trajectories, one after another
    logprobs  float32[N]                                          0 for tokens not sampled
    trained   uint8[N]                                            1 for trained tokens, else 0

The JSON form is `GroupJson`: the same heads, with `ids`, `logprobs` and `trained` in each trajectory. It is stored as
a frame. Versions are sent as spans, `[[version, tokens], ...]`; -1 is a token that no policy sampled, -2 one of unknown
version.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from tandem.errors import GroupRefused
from tandem.rollout.wire.schema import (
    MAGIC,
    MAX_GROUPS,
    MAX_HEAD_BYTES,
    MAX_TOKENS,
    PREFIX,
    Array,
    Bytes,
    GroupHead,
    GroupJson,
    Rules,
    SaidOfAll,
    TrajectoryHead,
    TrajectoryHeader,
    TrajectoryJson,
    WireGroup,
    decoded,
    path_of,
)
from tandem.rollout.wire.validation import at_fault, check_buffers, check_head, split
from tandem.types import Group, Trajectory

BINARY = "application/x-tandem-groups"
_TOKEN_BYTES = 9
_SMALL_BODY_BYTES = 4 * 2**20


# --- reading


def read_frames(body: Bytes, *, max_groups: int = MAX_GROUPS) -> list[WireGroup]:
    """Read and check all frames of a body; GroupRefused names the wrong field. `check` adds the registered bounds."""
    view, found = memoryview(body), list[WireGroup]()
    while len(view):
        field = f"groups.{len(found)}"
        if len(found) == max_groups:
            raise GroupRefused("groups", f"more than {max_groups} in one post")
        group = _read_frame(view, field)
        found.append(group)
        view = view[len(group.frame) :]
    if not found:
        raise GroupRefused("groups", "the body holds no group")
    return found


def read_json(body: Bytes, *, max_groups: int = MAX_GROUPS) -> list[WireGroup]:
    """Read a JSON body, `{"groups": [...]}`, and turn each group into a frame."""
    small = (
        len(body) <= _SMALL_BODY_BYTES
    )  # large bodies are decoded one group at a time: lists need many times the memory of their text
    groups = decoded(_SMALL_POST if small else _POST, body, "").groups
    if not 1 <= len(groups) <= max_groups:
        raise GroupRefused("groups", f"{len(groups)} in one post: must be 1 to {max_groups}")
    return [
        _from_json(each if small else _unpacked(each, f"groups.{number}"), f"groups.{number}")
        for number, each in enumerate(groups)
    ]


def check(group: WireGroup, rules: Rules, field: str = "") -> None:
    """Check a group against the bounds that trainer and environment registered."""
    if rules.num_ids and group.max_id >= rules.num_ids:
        unknown = _buffers(group)[0] >= rules.num_ids
        raise at_fault(group.head, unknown, field, "ids", f"id {group.max_id}, but the model has {rules.num_ids}")
    if rules.max_tokens and group.longest > rules.max_tokens:
        number = next(k for k, each in enumerate(group.head.trajectories) if each.length > rules.max_tokens)
        raise GroupRefused(
            path_of(field, f"trajectories.{number}.ids"),
            f"{group.longest} tokens, but at most {rules.max_tokens} are allowed",
        )
    if rules.group_size and group.size != rules.group_size:
        raise GroupRefused(
            path_of(field, "trajectories"), f"{group.size} siblings, but this environment registered {rules.group_size}"
        )


# --- writing and decoding


def encode(group: Group, **head: Any) -> WireGroup:
    """Encode trajectories as a frame. `head`: environment, ticket, extra."""
    heads = [
        TrajectoryHead(
            length=len(each.ids),
            reward=float(each.reward),
            spans=spans_of(each.versions),
            status=each.status,
            metrics=each.metrics,
            shaping=each.shaping,
            advantages=each.advantages,
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
        if each.images:
            raise GroupRefused(
                f"trajectories.{number}.images", "a frame has no images; play the environment in the run"
            )
    return assemble(
        GroupHead(heads, **head),
        [each.ids for each in group],
        [each.logprobs for each in group],
        [each.trained for each in group],
    )


def decode(frame: Bytes) -> Group:
    """Decode a frame into trajectories."""
    group = _read_frame(memoryview(frame), "")
    parts = [split(group.head, buffer) for buffer in _buffers(group)]
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
            advantages=head.advantages,
            thinking_tokens=head.thinking_tokens,
            unclosed=head.unclosed,
            task_id=head.task_id,
            messages=list(head.messages),
        )
        for head, ids, logprobs, trained in zip(group.head.trajectories, *parts, strict=True)
    ]


def to_json(frame: Bytes) -> GroupJson:
    """Convert a frame to the JSON form, which `msgspec.json.encode` writes."""
    group = _read_frame(memoryview(frame), "")
    parts = [split(group.head, buffer) for buffer in _buffers(group)]
    trajectories = [
        TrajectoryJson(
            ids=ids.tolist(),
            logprobs=logprobs.tolist(),
            trained=trained.tolist(),
            **_shared_fields(head, TrajectoryHeader),
        )
        for head, ids, logprobs, trained in zip(group.head.trajectories, *parts, strict=True)
    ]
    return GroupJson(trajectories, **_shared_fields(group.head, SaidOfAll))


def assemble(
    head: GroupHead,
    ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    trained: Sequence[Sequence[int | bool]],
    field: str = "",
) -> WireGroup:
    """Make a checked frame from lists, one per trajectory, with the lengths in the head."""
    try:
        encoded = msgspec.msgpack.encode(head)
    except OverflowError as error:
        check_head(head, field)  # raises with the field's name
        raise GroupRefused(field or "groups", str(error)) from None
    buffers = [
        *_packed("i", ids, path_of(field, "trajectories.{}.ids"), "an id is negative, or above 2^31 - 1"),
        *_packed("f", logprobs, path_of(field, "trajectories.{}.logprobs"), "one is beyond float32"),
        *_packed("B", trained, path_of(field, "trajectories.{}.trained"), "must be 0 or 1 (or false or true)"),
    ]
    prefix = PREFIX.pack(MAGIC, len(encoded), sum(map(len, buffers)))
    return _read_frame(memoryview(b"".join((prefix, encoded, *buffers))), field)


def _packed(kind: str, lists: Sequence[Sequence[float]], field: str, text: str) -> Iterator[bytes]:
    """Pack each list as little-endian numbers; `text` is the error for values out of range. `struct` takes half the
    time of making an array from a list."""
    for number, each in enumerate(lists):
        try:
            yield struct.pack(f"<{len(each)}{kind}", *each)
        except (struct.error, OverflowError):
            raise GroupRefused(field.format(number), text) from None


def spans_of(versions: Sequence[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    start = 0
    for end in range(1, len(versions) + 1):
        if end == len(versions) or versions[end] != versions[start]:
            spans.append((versions[start], end - start))
            start = end
    return spans


# --- one frame


class _RawPost(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[msgspec.Raw]


class GroupsPost(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[GroupJson]


_POST = msgspec.json.Decoder(_RawPost)
_SMALL_POST = msgspec.json.Decoder(GroupsPost)
_GROUP_JSON = msgspec.json.Decoder(GroupJson)
_GROUP_HEAD = msgspec.msgpack.Decoder(GroupHead)


def _shared_fields(of: msgspec.Struct, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of `kind`, which both forms share."""
    return {name: getattr(of, name) for name in kind.__struct_fields__}


def _read_frame(view: memoryview, field: str) -> WireGroup:
    if len(view) < PREFIX.size:
        raise GroupRefused(field, f"the body ends after {len(view)} bytes of a frame's prefix")
    magic, head_bytes, buffer_bytes = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise GroupRefused(field, f"a frame begins with {MAGIC!r}, not {bytes(magic)!r}")
    end = PREFIX.size + head_bytes + buffer_bytes
    if head_bytes > MAX_HEAD_BYTES or end > len(view):
        raise GroupRefused(
            field,
            f"the frame announces {head_bytes} + {buffer_bytes} bytes; {len(view) - PREFIX.size} follow, and a head "
            f"may have {MAX_HEAD_BYTES}",
        )
    head: GroupHead = decoded(_GROUP_HEAD, view[PREFIX.size : PREFIX.size + head_bytes], field)
    tokens, longest, oldest, newest, unknown = check_head(head, field)
    if buffer_bytes != tokens * _TOKEN_BYTES:
        raise GroupRefused(
            path_of(field, "trajectories"),
            f"lengths add up to {tokens} tokens, and the buffers hold {buffer_bytes / 9:g}",
        )
    frame = view[:end]
    max_id = check_buffers(head, *_arrays(frame, head_bytes, tokens), field)
    return WireGroup(frame, head, len(head.trajectories), tokens, longest, max_id, oldest, newest, unknown)


def _arrays(frame: Bytes, head_bytes: int, tokens: int) -> tuple[Array, Array, Array]:
    start = PREFIX.size + head_bytes
    ids = np.frombuffer(frame, "<i4", tokens, start)
    logprobs = np.frombuffer(frame, "<f4", tokens, start + 4 * tokens)
    return ids, logprobs, np.frombuffer(frame, np.uint8, tokens, start + 8 * tokens)


def _buffers(group: WireGroup) -> tuple[Array, Array, Array]:
    return _arrays(group.frame, PREFIX.unpack_from(group.frame)[1], group.tokens)


def _unpacked(raw: msgspec.Raw, field: str) -> GroupJson:
    # Counting commas bounds the number of values before any list is made.
    if (values := bytes(raw).count(b",")) > MAX_TOKENS:
        raise GroupRefused(field, f"{values} values; send a group of this size in the binary form")
    return decoded(_GROUP_JSON, raw, field)


def _from_json(group: GroupJson, field: str) -> WireGroup:
    for number, each in enumerate(group.trajectories):
        for name in ("logprobs", "trained"):
            if len(getattr(each, name)) != len(each.ids):
                raise GroupRefused(
                    path_of(field, f"trajectories.{number}.{name}"),
                    f"{len(getattr(each, name))} values for {len(each.ids)} ids",
                )
    heads = [
        TrajectoryHead(length=len(each.ids), **_shared_fields(each, TrajectoryHeader)) for each in group.trajectories
    ]
    return assemble(
        GroupHead(heads, **_shared_fields(group, SaidOfAll)),
        [each.ids for each in group.trajectories],
        [each.logprobs for each in group.trajectories],
        [each.trained for each in group.trajectories],
        field,
    )
