"""Posts that no rollout service should take: what is sent, and the field that the refusal must name."""

from __future__ import annotations

import copy
import gzip
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.rollout.wire import codec

JSON = "application/json"


@dataclass(frozen=True)
class Bad:
    name: str
    body: bytes
    field: str
    kind: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    statuses: tuple[int, ...] = (422,)


def good(environment: int = 1) -> dict[str, Any]:
    one = {
        "ids": [1, 2, 3, 4], "logprobs": [0, -0.5, -0.25, -1], "trained": [0, 1, 1, 1], "spans": [[-1, 1], [0, 3]],
        "reward": 1.0, "messages": [{"role": "user", "content": "hi"}], "metrics": {"steps": 1},
    }  # fmt: skip
    return {"environment": environment, "trajectories": [one, copy.deepcopy(one) | {"reward": 0.0}]}


def posted(group: Any) -> bytes:
    return json.dumps({"groups": [group]}).encode()


def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    group = good()
    change(group)
    return posted(group)


def in_second(name: str, value: Any) -> bytes:
    return changed(lambda group: group["trajectories"][1].update({name: value}))


SECOND = "groups.0.trajectories.1"
VALUES: list[tuple[str, str, Any, str]] = [
    ("a negative id", "ids", [1, -2, 3, 4], "ids"),
    ("an id beyond the vocabulary", "ids", [1, 2, 3, 1000], "ids"),
    ("an id beyond int32", "ids", [1, 2, 3, 2**31], "ids"),
    ("an id beyond int64", "ids", [1, 2, 3, 2**70], "ids"),
    ("an id that is a float", "ids", [1, 2, 3.5, 4], "ids.2"),
    ("an id that is text", "ids", [1, "2", 3, 4], "ids.1"),
    ("an id that is true", "ids", [1, True, 3, 4], "ids.1"),
    ("an id that is null", "ids", [None, 2, 3, 4], "ids.0"),
    ("nested ids", "ids", [[1, 2, 3, 4]], "ids.0"),
    ("ids that are text", "ids", "1234", "ids"),
    ("no ids", "ids", [], "logprobs"),
    ("ids shorter than the rest", "ids", [1, 2, 3], "logprobs"),
    ("more tokens than may be", "ids", [1] * 65, "logprobs"),
    ("logprobs shorter", "logprobs", [0, -1], "logprobs"),
    ("a logprob above zero", "logprobs", [0, 0.5, -1, -1], "logprobs"),
    ("a logprob beyond float32", "logprobs", [0, -1e39, -1, -1], "logprobs"),
    ("a logprob that is text", "logprobs", [0, "-1", -1, -1], "logprobs.1"),
    ("a logprob that is null", "logprobs", [0, None, -1, -1], "logprobs.1"),
    ("trained longer", "trained", [0, 1, 1, 1, 1], "trained"),
    ("trained of another alphabet", "trained", [0, 1, 2, 1], "trained"),
    ("trained as Atropos masks", "trained", [-100, 2, 3, 4], "trained"),
    ("trained that is text", "trained", [0, "1", 1, 1], "trained.1"),
    ("spans that cover too little", "spans", [[-1, 1], [0, 2]], "spans"),
    ("spans that cover too much", "spans", [[-1, 1], [0, 4]], "spans"),
    ("an empty span", "spans", [[-1, 1], [5, 0], [0, 3]], "spans"),
    ("a span that goes back", "spans", [[-1, 3], [0, -1], [0, 2]], "spans"),
    ("a version below -2", "spans", [[-1, 1], [-3, 3]], "spans"),
    ("a version beyond all versions", "spans", [[-1, 1], [2**60, 3]], "spans"),
    ("a span of three", "spans", [[-1, 1, 0], [0, 3]], "spans.0"),
    ("a trained token without a version", "spans", [[-1, 4]], "spans"),
    ("no spans", "spans", [], "spans"),
    ("a reward that is text", "reward", "1", "reward"),
    ("a reward that is null", "reward", None, "reward"),
    ("a reward that is a list", "reward", [1.0], "reward"),
    ("a status of our own making", "status", "splendid", "status"),
    ("a metric that is text", "metrics", {"a": "b"}, "metrics"),
    ("metrics without end", "metrics", {str(k): 1 for k in range(300)}, "metrics"),
    ("messages that are text", "messages", "hi", "messages"),
    ("messages nested without end", "messages", json.loads('[{"a":' + "[" * 40 + "]" * 40 + "}]"), "messages"),
    ("a task id without end", "task_id", "x" * 2000, "task_id"),
    ("more thinking than tokens", "thinking_tokens", 5, "thinking_tokens"),
    ("thinking below none", "thinking_tokens", -1, "thinking_tokens"),
    ("a whole number of 70 bits in what is its own", "extra", {"a": [{"b": 2**70}]}, "extra"),
    ("a whole number below 64 bits in what is its own", "extra", {"a": -(2**63) - 1}, "extra"),
    ("a whole number of 70 bits in a message", "messages", [{"role": "user", "content": 2**64}], "messages"),
    ("a version of 70 bits", "spans", [[-1, 1], [2**70, 3]], "spans"),
    ("a span of 2^70 tokens", "spans", [[-1, 1], [0, 2**70]], "spans"),
    ("thinking without end", "thinking_tokens", 2**70, "thinking_tokens"),
    ("a reward that nothing can be added to", "reward", 1.7e308, "reward"),
    ("a shaping that nothing can be added to", "shaping", -1.1e30, "shaping"),
    ("a metric that nothing can be added to", "metrics", {"fine": 1e30, "steps": 1.7e308}, "metrics"),
    ("an unknown field", "surprise", 1, "surprise"),
]


def json_bad() -> Iterator[Bad]:
    for name, key, value, where in VALUES:
        yield Bad(name, in_second(key, value), f"{SECOND}.{where}")
    for key in ("ids", "logprobs", "trained", "spans", "reward"):
        yield Bad(f"without {key}", changed(lambda g, key=key: g["trajectories"][1].pop(key)), f"{SECOND}.{key}")
    text = posted(good()).decode()
    for literal in ("NaN", "Infinity", "-Infinity", "1e999", "0x1", "01", ".5", "1.", "--1"):
        yield Bad(f"a reward of {literal}", text.replace('"reward": 0.0', f'"reward": {literal}').encode(), "")
    yield Bad("a logprob of NaN", text.replace("-0.25", "NaN").encode(), "")
    yield Bad("a lone surrogate", text.replace('"hi"', '"\\ud800"').encode(), "")
    yield Bad("a lone low surrogate in a key", text.replace('"steps"', '"\\udc00"').encode(), "")
    yield Bad("bytes that are not UTF-8", text.encode().replace(b'"hi"', b'"\xff\xfe"'), "")
    yield Bad("surrogates as bytes", text.encode().replace(b'"hi"', b'"\xed\xa0\x80"'), "")
    yield Bad("cut short", text.encode()[:-20], "")
    yield Bad("more after the end", text.encode() + b"{}", "")
    yield Bad("nothing", b"", "")
    yield Bad("a list", b"[]", "")
    yield Bad("null", b"null", "")
    yield Bad("no groups", b'{"groups": []}', "groups")
    yield Bad("groups that are null", b'{"groups": null}', "groups")
    yield Bad("nesting bomb", b"[" * 200_000, "")
    yield Bad("nesting bomb inside", b'{"groups": ' + b'{"extra":' * 100_000, "")
    yield Bad("an integer of 5000 digits", text.replace('"reward": 0.0', '"reward": ' + "9" * 5000).encode(), "")
    yield Bad("no trajectories", posted(good() | {"trajectories": []}), "groups.0.trajectories")
    yield Bad("an environment nobody knows", posted(good(99)), "", statuses=(404,))
    yield Bad("an environment below none", posted(good(-1)), "groups.0.environment")
    yield Bad("an environment of 70 bits", posted(good(2**70)), "groups.0.environment")
    yield Bad("a ticket of 70 bits", posted(good() | {"ticket": 2**70}), "groups.0.ticket")
    yield Bad("a whole number of 70 bits beside it", posted(good() | {"extra": {"a": 2**70}}), "groups.0.extra")
    yield Bad("a ticket nobody has", posted(good() | {"ticket": 12345}), "", statuses=(409,))
    yield Bad("nothing is trained", posted(_untrained()), "groups.0.trajectories.0.trained")
    yield Bad("siblings of another number", posted({**good(), "trajectories": good()["trajectories"] * 2}), "groups.0")
    yield Bad("a good group before a bad one", _second_of_two(), "groups.1.trajectories.0.ids")
    yield Bad("too many tokens", posted(_long(65)), "groups.0.trajectories.0.ids")
    yield Bad("not gzip", b"not gzip", "content-encoding", headers={"Content-Encoding": "gzip"})
    bomb = gzip.compress(b" " * 80_000_000)
    yield Bad("a gzip bomb", bomb, "", headers={"Content-Encoding": "gzip"}, statuses=(413,))
    yield Bad(
        "half a gzip", gzip.compress(text.encode())[:-9], "content-encoding", headers={"Content-Encoding": "gzip"}
    )
    twice = gzip.compress(gzip.compress(text.encode()))
    yield Bad("gzip in gzip", twice, "", headers={"Content-Encoding": "gzip"})
    yield Bad("brotli", b"x", "content-encoding", headers={"Content-Encoding": "br"}, statuses=(415,))
    yield Bad("of another type", text.encode(), "content-type", kind="application/pickle", statuses=(415,))


def _untrained() -> dict[str, Any]:
    group = good()
    for each in group["trajectories"]:
        each["trained"] = [0, 0, 0, 0]
    return group


def _long(tokens: int) -> dict[str, Any]:
    one = {"ids": [1] * tokens, "logprobs": [-1.0] * tokens, "trained": [1] * tokens, "spans": [[0, tokens]]}
    return {"environment": 1, "trajectories": [one | {"reward": 1}, one | {"reward": 0}]}


def _second_of_two() -> bytes:
    bad = good()
    bad["trajectories"][0]["ids"] = [-1, 2, 3, 4]
    return json.dumps({"groups": [good(), bad]}).encode()


def frame(head: Any, buffers: bytes, *, magic: bytes = b"TGR1", head_bytes: int | None = None) -> bytes:
    packed = head if isinstance(head, bytes) else msgspec.msgpack.encode(head)
    size = len(packed) if head_bytes is None else head_bytes
    return struct.pack("<4sIQ", magic, size, len(buffers)) + packed + buffers


def head(**changes: Any) -> dict[str, Any]:
    one = {"length": 2, "reward": 1.0, "spans": [[0, 2]]}
    return {"environment": 1, "trajectories": [one | changes, one]}


def buffers(ids: Any = (1, 2, 3, 4), logprobs: Any = (-1.0,) * 4, trained: bytes = b"\1\1\1\1") -> bytes:
    return struct.pack(f"<{len(ids)}i{len(logprobs)}f", *ids, *logprobs) + trained


def binary_bad() -> Iterator[Bad]:
    def bad(name: str, body: bytes, where: str) -> Bad:
        return Bad(f"binary: {name}", body, where, codec.BINARY)

    nan, inf = float("nan"), float("inf")
    second, first = "groups.0.trajectories.1", "groups.0.trajectories.0"
    whole = frame(head(), buffers())
    yield bad("nothing", b"", "groups")
    yield bad("a wrong beginning", b"TGR2" + whole[4:], "groups.0")
    yield bad("cut in the beginning", whole[:10], "groups.0")
    yield bad("cut in the head", whole[:20], "groups.0")
    yield bad("cut in the buffers", whole[:-1], "groups.0")
    yield bad("more after the end", whole + b"x", "groups.1")
    yield bad("a head of 4 GB", frame(head(), buffers(), head_bytes=2**32 - 1), "groups.0")
    yield bad("buffers of an exabyte", struct.pack("<4sIQ", b"TGR1", 10, 2**63) + b"x" * 99, "groups.0")
    yield bad("a head that is no msgpack", frame(b"\xc1\xc1", buffers()), "groups.0")
    yield bad("a head that is a list", frame([1], buffers()), "groups.0")
    yield bad("a head that nests without end", frame(b"\x91" * 100_000, buffers()), "groups.0")
    yield bad("a head that promises 4G entries", frame(b"\xdd\xff\xff\xff\xff", buffers()), "groups.0")
    yield bad("an unknown field", frame(head() | {"pickle": b"x"}, buffers()), "groups.0.pickle")
    yield bad("a length below none", frame(head(length=-2), buffers()), f"{first}.ids")
    yield bad("a length beyond all", frame(head(length=2**62, spans=[[0, 2**62]]), buffers()), "groups.0.trajectories")
    yield bad("lengths that add up to more", frame(head(length=3, spans=[[0, 3]]), buffers()), "groups.0.trajectories")
    yield bad("a reward of NaN", frame(head(reward=nan), buffers()), f"{first}.reward")
    yield bad("a reward of infinity", frame(head(reward=-inf), buffers()), f"{first}.reward")
    yield bad("a shaping of NaN", frame(head(shaping=nan), buffers()), f"{first}.shaping")
    yield bad("a metric of NaN", frame(head(metrics={"a": nan}), buffers()), f"{first}.metrics")
    yield bad("NaN in what is its own", frame(head(extra={"a": [nan]}), buffers()), f"{first}.extra")
    yield bad("bytes in what is its own", frame(head(extra={"a": b"x"}), buffers()), f"{first}.extra")
    yield bad(
        "text that is not UTF-8", frame(head(task_id="ABCD"), buffers()).replace(b"ABCD", b"\xff\xfeCD"), "groups.0"
    )
    yield bad("a version of 64 bits", frame(head(spans=[[2**64 - 1, 2]]), buffers()), f"{first}.spans")
    yield bad(
        "an environment of 64 bits", frame(head() | {"environment": 2**64 - 1}, buffers()), "groups.0.environment"
    )
    yield bad("a negative id", frame(head(), buffers(ids=(1, 2, 3, -4))), f"{second}.ids")
    yield bad("an id beyond the vocabulary", frame(head(), buffers(ids=(1, 2, 3, 1000))), f"{second}.ids")
    yield bad("a logprob of NaN", frame(head(), buffers(logprobs=(-1, -1, nan, -1))), f"{second}.logprobs")
    yield bad("a logprob of -infinity", frame(head(), buffers(logprobs=(-1, -inf, -1, -1))), f"{first}.logprobs")
    yield bad("a logprob above zero", frame(head(), buffers(logprobs=(-1, -1, -1, 1))), f"{second}.logprobs")
    yield bad("trained of another alphabet", frame(head(), buffers(trained=b"\1\1\xff\1")), f"{second}.trained")
    yield bad("nothing is trained", frame(head(), buffers(trained=bytes(4))), f"{first}.trained")
    yield bad("a trained token without a version", frame(head(spans=[[-1, 2]]), buffers()), f"{first}.spans")


CORPUS = [*json_bad(), *binary_bad()]
GOOD_FRAME = frame(head(), buffers())
