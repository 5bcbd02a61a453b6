"""The JSON messages between an engine's server and its client, defined once for both ends.

A completion is sent as lines: `Tokens` with tokens of one version as they are sampled, and at the end `StreamEnd` or an
error. An error keeps its class.
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
"""Another trainer has attached since. Attaching again must not be tried: the two would replace each other for ever."""

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
    """[version, tokens]. If the request was restarted under a new version, these count only the last tokens; earlier
    ones are void."""


def code_of(error: TandemError) -> str:
    """Return the code of an error's class; empty for a class that is not sent."""
    return next((code for code, kind in _CLASSES.items() if isinstance(error, kind)), "")


def error_of(body: Any, otherwise: str) -> TandemError:
    """Return the error in a response. `otherwise`: its text if the body is not an error of Tandem."""
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
    """Return the value as JSON. ValueError for NaN and infinity, which JSON lacks."""
    try:
        content = msgspec.json.encode(value)
    except (TypeError, UnicodeEncodeError):  # numpy's numbers, lone surrogates
        content = b"null"
    if b"null" in content:  # NaN may have been written as null
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return content


decoded = msgspec.json.decode
"""Parses JSON; ValueError if it is invalid."""
