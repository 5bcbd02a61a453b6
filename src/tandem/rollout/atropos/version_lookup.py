"""Ask a gateway which versions sampled the tokens of an Atropos post.

consumes: groups of an Atropos environment     waits for: the gateway, for `PATIENCE_S` at most
produces: the groups with versions, and with logprobs and samplings where the gateway recorded them

If the gateway does not answer, the group is still accepted: its tokens keep UNKNOWN_VERSION, and are counted.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.errors import TandemError
from tandem.rollout.remote.client import ServiceClient
from tandem.rollout.sessions.token_versions import SessionRecord
from tandem.rollout.wire import codec
from tandem.types import Group, Trajectory

_log = logging.getLogger(__name__)

PATIENCE_S = 10.0
_TOKENS_AT_ONCE = 2**20
_WITHOUT = "without_logprobs"


class Stamp(msgspec.Struct):
    """The gateway's answer for one trajectory."""

    spans: list[tuple[int, int]]
    samplings: list[tuple[float, float, int]] = []
    """Temperature, top_p and top_k of the turns that it recognised."""
    logprobs: list[float] | None = None
    """For a trajectory without logprobs: those of all trained tokens, or None."""


class Stamps(msgspec.Struct):
    trajectories: list[Stamp]


@dataclass(frozen=True)
class Stamped:
    group: Group
    samplings: frozenset[tuple[float, float, int]]
    has_logprobs: bool
    answered: bool
    """Whether the gateway answered."""


def stamp_frame(record: SessionRecord, body: bytes) -> bytes:
    """Return the gateway's answer to a frame of trajectories."""
    (frame,) = codec.read_frames(body, max_groups=1)
    without = bool(frame.head.extra.get(_WITHOUT))
    found: list[Stamp] = []
    for each in codec.decode(frame.frame):
        proven = record.prove(each.ids, each.trained, None if without else each.logprobs)
        found.append(Stamp(codec.spans_of(proven.versions), sorted(proven.samplings), proven.logprobs))
    return msgspec.json.encode(Stamps(found))


class GatewayStamps:
    def __init__(self, url: str, token_file: Path) -> None:
        self._client = ServiceClient(
            url, token_file, patience_s=PATIENCE_S, url_option="--gateway", token_option="--gateway-token-file"
        )

    async def stamp(self, group: Group, *, has_logprobs: bool) -> Stamped:
        try:
            found = [stamp for part in _parts(group) for stamp in await self._ask(part, has_logprobs)]
        except TandemError as error:
            _log.warning("a group is accepted with unknown versions, because the gateway did not answer: %s", error)
            return Stamped(group, frozenset(), has_logprobs, False)
        stamped = [_with(each, stamp) for each, stamp in zip(group, found, strict=True)]
        samplings = frozenset(sampling for stamp in found for sampling in stamp.samplings)
        known = has_logprobs or all(stamp.logprobs is not None for stamp in found)
        return Stamped(stamped, samplings, known, True)

    async def _ask(self, part: Sequence[Trajectory], has_logprobs: bool) -> list[Stamp]:
        extra = {} if has_logprobs else {_WITHOUT: True}
        frame = bytes(codec.encode([dataclasses.replace(each, messages=[]) for each in part], extra=extra).frame)
        told = await self._client.post("/stamps", frame, content_type=codec.BINARY)
        return msgspec.convert(told, Stamps).trajectories

    async def close(self) -> None:
        await self._client.close()


def _with(each: Trajectory, stamp: Stamp) -> Trajectory:
    versions = [version for version, count in stamp.spans for _ in range(count)]
    logprobs = each.logprobs if stamp.logprobs is None else [min(value, 0.0) for value in stamp.logprobs]
    return dataclasses.replace(each, versions=versions, logprobs=logprobs)


def _parts(group: Group) -> Iterator[list[Trajectory]]:
    """Split the siblings into requests of bounded size."""
    part: list[Trajectory] = []
    tokens = 0
    for each in group:
        if part and tokens + len(each.ids) > _TOKENS_AT_ONCE:
            yield part
            part, tokens = [], 0
        part.append(each)
        tokens += len(each.ids)
    yield part
