"""Bodies of posts as Atropos clients send them, and invalid ones."""

from __future__ import annotations

import json
import random
from typing import Any

PROMPT = 4
LENGTH = 12


def group(
    size: int = 2, *, env_id: int | None = 0, length: int = LENGTH, seed: int = 0, **changes: Any
) -> dict[str, Any]:
    """`seed` makes its bytes its own."""
    chance = random.Random(seed)
    tokens = [[chance.randrange(1000) for _ in range(length)] for _ in range(size)]
    return {
        "tokens": tokens,
        "masks": [[-100] * PROMPT + row[PROMPT:] for row in tokens],
        "scores": [chance.random() for _ in range(size)],
        "inference_logprobs": [
            [1.0] * PROMPT + [-chance.random() for _ in range(length - PROMPT)] for _ in range(size)
        ],
        "env_id": env_id,
    } | changes  # fmt: skip


def encoded(*args: Any, **changes: Any) -> bytes:
    return json.dumps(group(*args, **changes)).encode()


def _with(field: str, value: Any, *path: int) -> bytes:
    """One value of a good post replaced."""
    post = group()
    at: Any = post
    for key in (field, *path)[:-1]:
        at = at[key]
    at[(field, *path)[-1]] = value
    return json.dumps(post).encode()


def _raw(field: str, text: str) -> bytes:
    """A good post with one field written by hand."""
    post = group()
    post.pop(field, None)
    return (json.dumps(post)[:-1] + f', "{field}": {text}}}').encode()


def _without(field: str) -> bytes:
    post = group()
    del post[field]
    return json.dumps(post).encode()


_ROWS = [[0.0] * LENGTH] * 2
_FLOATS = ("advantages", "ref_logprobs", "inference_logprobs")

MALFORMED: list[tuple[str, str, bytes]] = [
    # what is not JSON, or no object
    ("empty object", "tokens", b"{}"),
    ("a list", "body", b"[]"),
    ("a number", "body", b"1"),
    ("a string", "body", b'"tokens"'),
    ("null", "body", b"null"),
    ("cut off", "env_id", encoded()[:-1]),
    ("cut off in a number", "tokens", encoded()[:30]),
    ("two objects", "env_id", encoded() + encoded()),
    ("trailing comma", "env_id", encoded()[:-1] + b",}"),
    ("single quotes", "body", b"{'tokens': [[1]], 'masks': [[1]], 'scores': [1]}"),
    ("binary", "body", bytes(range(256))),
    ("UTF-16", "body", encoded().decode().encode("utf-16")),
    # numbers that are none
    ("NaN score", "scores", _with("scores", float("nan"), 0)),
    ("inf score", "scores", _with("scores", float("inf"), 1)),
    ("-inf score", "scores", _with("scores", float("-inf"), 1)),
    ("score beyond float64", "scores", _raw("scores", "[1e999, 0]")),
    ("score with a million digits", "scores", _raw("scores", f"[{'9' * 1_000_000}, 0]")),
    ("score as text", "scores", _with("scores", "1.0", 0)),
    ("score null", "scores", _with("scores", None, 0)),
    ("score true", "scores", _with("scores", True, 0)),
    ("scores of scores", "scores", _with("scores", [1.0], 0)),
    ("hexadecimal score", "scores", _raw("scores", "[0x10, 0]")),
    *((f"NaN in {name}", name, _with(name, [[float("nan")] * LENGTH] * 2)) for name in _FLOATS),
    *((f"inf in {name}", name, _with(name, [[float("inf")] * LENGTH] * 2)) for name in _FLOATS),
    ("score that nothing can be added to", "scores", _with("scores", 1.7e308, 0)),
    ("whole score that nothing can be added to", "scores", _raw("scores", f"[{10**31}, 0]")),
    *((f"beyond bounds in {name}", name, _with(name, [[-1.1e30] * LENGTH] * 2)) for name in _FLOATS),
    # lengths that differ
    ("scores too few", "scores", _with("scores", [1.0])),
    ("scores too many", "scores", _with("scores", [1.0] * 3)),
    ("masks too few", "masks", _with("masks", group()["masks"][:1])),
    ("mask too short", "masks", _with("masks", [-100] * (LENGTH - 1), 1)),
    ("mask too long", "masks", _with("masks", [-100] * (LENGTH + 1), 1)),
    *((f"{name} too few", name, _with(name, _ROWS[:1])) for name in _FLOATS),
    *((f"{name} of other lengths", name, _with(name, [[0.0] * LENGTH, [0.0]])) for name in _FLOATS),
    ("messages too few", "messages", _with("messages", [[{"role": "user", "content": "x"}]])),
    ("overrides too few", "overrides", _with("overrides", [{}])),
    ("distilled too few", "distill_token_ids", _with("distill_token_ids", [[[1]]])),
    ("distilled ids alone", "distill_logprobs", _with("distill_token_ids", [[[1]] * LENGTH] * 2)),
    # tokens
    ("no tokens", "tokens", _without("tokens")),
    ("no masks", "masks", _without("masks")),
    ("no scores", "scores", _without("scores")),
    ("empty group", "tokens", b'{"tokens": [], "masks": [], "scores": []}'),
    ("empty sequence", "tokens", b'{"tokens": [[], []], "masks": [[], []], "scores": [1, 2], "env_id": 0}'),
    ("negative id", "tokens", _with("tokens", -1, 0, 5)),
    ("huge id", "tokens", _with("tokens", 10**9, 1, 5)),
    ("id beyond int64", "tokens", _with("tokens", 2**70, 1, 5)),
    ("id is a float", "tokens", _with("tokens", 1.5, 0, 0)),
    ("id is text", "tokens", _with("tokens", "7", 0, 0)),
    ("id is true", "tokens", _with("tokens", True, 0, 0)),
    ("id is null", "tokens", _with("tokens", None, 0, 0)),
    ("tokens flat", "tokens", _with("tokens", [1, 2, 3])),
    ("tokens an object", "tokens", _with("tokens", {"0": [1]})),
    ("too long", "tokens", encoded(length=600)),
    ("too many siblings", "tokens", encoded(5000, length=5)),
    # masks and logprobs
    ("mask of ones", "masks", _with("masks", [[1] * LENGTH] * 2)),
    ("mask of another token", "masks", _with("masks", 1001, 0, LENGTH - 1)),
    ("mask below -100", "masks", _with("masks", -101, 0, 0)),
    ("logprob above 0", "inference_logprobs", _with("inference_logprobs", 0.7, 0, LENGTH - 1)),
    ("a trained token with the mark", "inference_logprobs", _with("inference_logprobs", 1.0, 1, LENGTH - 1)),
    ("a masked token with neither", "inference_logprobs", _with("inference_logprobs", 0.5, 0, 0)),
    # text
    ("lone surrogate", "messages", _raw("messages", r'[[{"role": "user", "content": "\ud800"}], []]')),
    ("surrogates swapped", "messages", _raw("messages", r'[[{"role": "user", "content": "\udc00\ud800"}], []]')),
    ("lone surrogate in a key", "generation_params", _raw("generation_params", r'{"a\udfff": 1}')),
    ("not UTF-8", "messages", _raw("messages", '[[{"role": "§", "content": ""}], []]').replace("§".encode(), b"\xff")),
    ("surrogate as UTF-8", "images", _raw("images", '["§"]').replace("§".encode(), b"\xed\xa0\x80")),
    ("message without role", "messages", _with("messages", [[{"content": "x"}], []])),
    ("message without content", "messages", _with("messages", [[{"role": "user"}], []])),
    ("message is text", "messages", _with("messages", [["hello"], []])),
    # the rest
    ("unknown environment", "env_id", encoded(env_id=4711)),
    ("70 bits in a message", "messages", encoded(messages=[[{"role": "user", "content": [2**70]}], []])),
    ("70 bits in overrides", "overrides", encoded(overrides=[{"temperature": 2**70}, {}])),
    ("70 bits in group_overrides", "group_overrides", encoded(group_overrides={"a": {"b": -(2**70)}})),
    ("70 bits in generation_params", "generation_params", encoded(generation_params={"seed": 2**64})),
    ("70 bits in images", "images", encoded(images=[[2**70], None])),
    ("negative environment", "env_id", encoded(env_id=-1)),
    ("environment as text", "env_id", encoded(env_id="0")),
    ("environment as float", "env_id", encoded(env_id=0.5)),
    ("override is no object", "overrides", _with("overrides", [1, 2])),
    ("temperature as text", "overrides", _with("overrides", [{"temperature": "hot"}, {}])),
    ("group overrides a list", "group_overrides", _with("group_overrides", [1])),
    ("generation params a list", "generation_params", _with("generation_params", [1])),
    ("NaN in generation params", "generation_params", _with("generation_params", {"temperature": float("nan")})),
    # bombs
    ("nested lists without end", "images", _raw("images", "[" * 200_000 + "]" * 200_000)),
    ("nested objects", "generation_params", _raw("generation_params", '{"a":' * 200_000 + "1" + "}" * 200_000)),
    ("nested and never closed", "tokens", b'{"tokens":' + b"[" * 1_000_000),
]  # fmt: skip
