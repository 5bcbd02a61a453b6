"""What an engine's server and its client say to each other, written down once for both ends. JSON, and nothing else.

A completion travels as lines: tokens of one version as they are made, `Tokens`, and at last how it ended, `StreamEnd`,
or an error. An error keeps its class across the wire.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias, TypedDict, cast

import msgspec

from tandem.errors import EngineError, EngineLost, EngineSilent, LogprobGap, SyncError, SyncTimeout, TandemError
from tandem.types import FinishReason, Served

Json: TypeAlias = Mapping[str, Any]

FENCED = "fenced"
"""Another trainer has attached since. Not an error that attaching again may cure: the two would take turns for ever."""

_CLASSES: dict[str, type[TandemError]] = {
    "sync_timeout": SyncTimeout,
    "sync": SyncError,
    "engine_lost": EngineLost,
    "engine_silent": EngineSilent,
    "logprob_gap": LogprobGap,
    "engine": EngineError,
}


class Tokens(TypedDict):
    ids: list[int]
    logprobs: list[float]
    version: int


class StreamEnd(TypedDict):
    finish_reason: FinishReason
    spans: list[list[int]]
    """[version, tokens]. Where a request began again under a new version, tokens before the last ones so counted were
    forgotten."""


def code_of(error: TandemError) -> str:
    """Empty for a class that has no business on this wire."""
    return next((code for code, kind in _CLASSES.items() if isinstance(error, kind)), "")


def error_of(body: Any, otherwise: str) -> TandemError:
    """The error that an answer tells of. `otherwise`: its text, if it is no error of ours."""
    told: Any = cast("Any", body).get("error") if isinstance(body, dict) else None
    if not isinstance(told, dict):
        return EngineError(otherwise)
    told = cast("dict[str, Any]", told)
    kind = TandemError if told.get("code") == FENCED else _CLASSES.get(str(told.get("code")), EngineError)
    return kind(str(told.get("message", otherwise)))


def served_as_json(served: Served) -> dict[str, Any]:
    return {each.name: getattr(served, each.name) for each in fields(Served)}


def served_of(body: Json) -> Served:
    return Served(
        int(body["version"]),
        {str(name): str(fingerprint) for name, fingerprint in body["fingerprints"].items()},
        tuple(str(name) for name in body["engines"]),
        int(body["cache_epoch"]),
        {str(phase): float(seconds) for phase, seconds in body["seconds"].items()},
        read_back=bool(body["read_back"]),
        lent_bytes=int(body["lent_bytes"]),
    )


def line(value: Mapping[str, Any] | Tokens | StreamEnd) -> bytes:
    return encoded(value) + b"\n"


def encoded(value: Any) -> bytes:
    """ValueError for what is no number: there is no JSON of it."""
    try:
        content = msgspec.json.encode(value)
    except (TypeError, UnicodeEncodeError):  # numpy's numbers, halves of a character
        content = b"null"
    if b"null" in content:  # which may be how what is no number was written
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return content


decoded = msgspec.json.decode
"""ValueError for what is no JSON."""
