"""Checks for every group: numbers are finite, lengths agree, trained tokens have versions."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from tandem.errors import GroupRefused
from tandem.rollout.wire.schema import MAX_SIBLINGS, MAX_TOKENS, Array, GroupHead, TrajectoryHead, path_of
from tandem.types import MAX_METRICS, MAX_NUMBER, NO_VERSION, NUMBERS, UNKNOWN_VERSION

_MAX_VERSION, _MAX_NAME, _MAX_DEPTH = 2**53, 1024, 16
_MAX_LOGPROB = 0.01  # how far rounding may lift a logprob over 0


def check_head(head: GroupHead, field: str) -> tuple[int, int, int, int, int]:
    """Check a head. Return its tokens, those of the longest trajectory, the oldest version, the newest, and the number
    of tokens of unknown version."""
    if not 1 <= len(head.trajectories) <= MAX_SIBLINGS:
        raise GroupRefused(path_of(field, "trajectories"), f"{len(head.trajectories)}: must be 1 to {MAX_SIBLINGS}")
    for name, number in (("environment", head.environment), ("ticket", head.ticket)):
        if number is not None and not 0 <= number < _MAX_VERSION:
            raise GroupRefused(path_of(field, name), f"{number}: must be 0 or above, and below 2^53")
    if head.extra:
        check_plain(head.extra, path_of(field, "extra"))
    tokens = longest = unknown = 0
    oldest, newest = _MAX_VERSION, NO_VERSION
    for number, each in enumerate(head.trajectories):
        _check_trajectory(each, field, number)
        tokens += each.length
        longest = max(longest, each.length)
        for version, count in each.spans:
            unknown += count if version == UNKNOWN_VERSION else 0
            if version >= 0:
                oldest, newest = min(oldest, version), max(newest, version)
    if tokens > MAX_TOKENS:
        raise GroupRefused(path_of(field, "trajectories"), f"{tokens} tokens; a group may have {MAX_TOKENS}")
    return tokens, longest, oldest if newest >= 0 else NO_VERSION, newest, unknown


def _check_trajectory(head: TrajectoryHead, field: str, number: int) -> None:
    def refuse(name: str, text: str) -> GroupRefused:
        return GroupRefused(path_of(field, f"trajectories.{number}.{name}"), text)

    if head.length < 1:
        raise refuse("ids", "no tokens")
    if not abs(head.reward) <= MAX_NUMBER:  # also refuses NaN
        raise refuse("reward", f"{head.reward:g}: must be finite, {NUMBERS}")
    if not abs(head.shaping) <= MAX_NUMBER:
        raise refuse("shaping", f"{head.shaping:g}: must be finite, {NUMBERS}")
    if head.advantages and len(head.advantages) != head.length:
        raise refuse("advantages", f"{len(head.advantages)} for {head.length} tokens")
    if not all(abs(value) <= MAX_NUMBER for value in head.advantages):
        raise refuse("advantages", f"one value is not finite, or too large: must be {NUMBERS}")
    if any(count < 1 or not UNKNOWN_VERSION <= version < _MAX_VERSION for version, count in head.spans):
        raise refuse("spans", "each must be [version, tokens], with a version of -2 or above and at least one token")
    if (spanned := sum(count for _, count in head.spans)) != head.length:
        raise refuse("spans", f"cover {spanned} tokens of {head.length}")
    if not 0 <= head.thinking_tokens <= head.length:
        raise refuse("thinking_tokens", f"{head.thinking_tokens} of {head.length} tokens")
    if len(head.task_id) > _MAX_NAME:
        raise refuse("task_id", f"longer than {_MAX_NAME} characters")
    if head.metrics:
        if len(head.metrics) > MAX_METRICS or any(len(name) > _MAX_NAME for name in head.metrics):
            raise refuse("metrics", f"more than {MAX_METRICS}, or a name of more than {_MAX_NAME} characters")
        if not all(abs(value) <= MAX_NUMBER for value in head.metrics.values()):
            raise refuse("metrics", f"a value is not finite, or too large: must be {NUMBERS}")
    if head.messages:
        check_plain(head.messages, path_of(field, f"trajectories.{number}.messages"))
    if head.extra:
        check_plain(head.extra, path_of(field, f"trajectories.{number}.extra"))


def check_plain(value: Any, field: str, depth: int = 0) -> None:
    """Refuse a value that JSON or msgpack cannot hold (NaN, bytes, dates, numbers of more than 64 bits) or that is
    nested too deeply."""
    if depth > _MAX_DEPTH:
        raise GroupRefused(field, f"is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict):
        for key, each in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                raise GroupRefused(field, f"the key {key!r} is not text")
            check_plain(each, field, depth + 1)
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            check_plain(each, field, depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise GroupRefused(field, f"{value} is not a finite number")
    elif isinstance(value, int):
        check_whole(value, field)
    elif value is not None and not isinstance(value, str):
        raise GroupRefused(field, f"JSON cannot hold a {type(value).__name__}")


def check_whole(value: int, field: str) -> None:
    if not -(2**63) <= value < 2**64:
        raise GroupRefused(field, "a whole number of more than 64 bits: must be -2^63 to 2^64 - 1")


def check_buffers(head: GroupHead, ids: Array, logprobs: Array, trained: Array, field: str) -> int:
    """Check the numbers of all trajectories at once; return the largest id. The wrong trajectory is looked up only for
    an error."""
    low, high = float(logprobs.min()), float(logprobs.max())  # NaN would make both NaN
    max_id = int(ids.max())
    if ids.min() < 0:
        raise at_fault(head, ids < 0, field, "ids", "an id is negative")
    if not (math.isfinite(low) and math.isfinite(high)):
        raise at_fault(head, ~np.isfinite(logprobs), field, "logprobs", "one is not finite")
    if high > _MAX_LOGPROB:
        raise at_fault(head, logprobs > _MAX_LOGPROB, field, "logprobs", f"{high:g}: a logprob is not above 0")
    if trained.max() > 1:
        raise at_fault(head, trained > 1, field, "trained", "must be 0 or 1")
    if not trained.any():
        raise GroupRefused(path_of(field, "trajectories.0.trained"), "no token of the group is trained")
    _check_versions(head, trained, field)
    return max_id


def at_fault(head: GroupHead, wrong: Array, field: str, name: str, text: str) -> GroupRefused:
    """Return the error, naming the first trajectory in which `wrong` is set."""
    number = next(number for number, part in enumerate(split(head, wrong)) if part.any())
    return GroupRefused(path_of(field, f"trajectories.{number}.{name}"), text)


def _check_versions(head: GroupHead, trained: Array, field: str) -> None:
    """Refuse trained tokens without a version: their staleness would be unknown."""
    start = 0
    for number, each in enumerate(head.trajectories):
        if each.status == "recorded":
            start += each.length
            continue
        for version, count in each.spans:
            if version == NO_VERSION and trained[start : start + count].any():
                raise GroupRefused(
                    path_of(field, f"trajectories.{number}.spans"),
                    "a trained token has no version: set the version that sampled it, -2 if that is unknown, "
                    "or set status = 'recorded'",
                )
            start += count


def split(head: GroupHead, buffer: Array) -> list[Array]:
    ends = np.cumsum([each.length for each in head.trajectories])
    return np.split(buffer, ends[:-1])
