"""The Atropos form of a group: what is refused, by which field name, and that the stored bytes are the posted ones."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from atropos_bodies import LENGTH, MALFORMED, PROMPT, encoded, group

from tandem.errors import GroupRefused
from tandem.rollout.atropos import codec as wire
from tandem.rollout.wire import codec as native
from tandem.types import NO_VERSION, UNKNOWN_VERSION

BY_RULE = {"unknown environment", "too long"}
"""What only the service can know."""


@pytest.mark.parametrize(("name", "field", "body"), MALFORMED, ids=[name for name, _, _ in MALFORMED])
def test_a_malformed_post_is_refused_with_the_name_of_its_field(name: str, field: str, body: bytes):
    if name in BY_RULE:
        assert wire.read_one(body)
        return
    took: list[float] = []
    for _ in range(3):  # one of them may have the garbage of all tests before to collect
        started = time.thread_time()
        with pytest.raises(GroupRefused) as refused:
            wire.read_one(body)
        took.append(time.thread_time() - started)
        assert refused.value.field.partition(".")[0] == field
        assert len(str(refused.value)) < 400
    assert min(took) < 0.5


def test_in_a_list_the_field_says_which_group_it_is_of():
    bodies = [encoded(seed=1), encoded(seed=2, scores=[1.0]), encoded(seed=3)]
    with pytest.raises(GroupRefused) as refused:
        wire.read_list(b"[" + b",".join(bodies) + b"]")
    assert refused.value.field == "1.scores"


@pytest.mark.parametrize("more", [{}, {"messages": [[{"role": "user", "content": "}, {"}], []], "images": ["]}"]}])
@pytest.mark.parametrize("between", [",", " ,\n "])
def test_a_list_is_taken_apart_wherever_its_braces_are(more: dict[str, Any], between: str):
    bodies = [encoded(seed=1), encoded(seed=2, **more), encoded(seed=3)]
    read = wire.read_list(b" [ " + between.encode().join(bodies) + b" ] ")
    assert [each.data.scores for each in read] == [json.loads(body)["scores"] for body in bodies]


@pytest.mark.parametrize(
    "body", [b"[{}", b"[}{]", b"[{},]", b"[{}{}]", b"{}", b"[[{}]]", b"x[{}]", b"[{}]x", b'["{", {}, "}"]']
)
def test_what_is_no_list_of_groups_is_refused(body: bytes):
    good = encoded(seed=1)
    with pytest.raises(GroupRefused):
        wire.read_list(body.replace(b"{}", good))


def test_what_is_stored_has_all_fourteen_keys_and_the_bytes_that_were_posted():
    body = encoded(seed=4)
    scored = wire.read_one(body)
    stored = bytes(wire.as_posted(scored.stored(7, 0).frame))
    assert stored.startswith(body[:-1])
    assert json.loads(stored) == dict.fromkeys(wire.KEYS) | json.loads(body)
    assert len(wire.KEYS) == 14


def test_keys_that_nobody_knows_are_left_out_and_empty_lists_mean_none():
    """As their own collector sends them; their own trainer would index into the empty list."""
    post = group(seed=5, overrides=[], messages=[], advantages=[], ref_logprobs=[], group_overrides={}, images=[], x=1)
    stored = json.loads(bytes(wire.as_posted(wire.read_one(json.dumps(post).encode()).stored(7, 0).frame)))
    assert set(stored) == set(wire.KEYS)
    assert [stored[name] for name in ("overrides", "messages", "advantages", "ref_logprobs")] == [None] * 4
    assert stored["tokens"] == post["tokens"]
    assert (stored["group_overrides"], stored["images"]) == ({}, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"masks": [[-100] * LENGTH] * 2},
        {"messages": [[{"role": "assistant", "content": None, "tool_calls": []}], []]},
        {"distill_token_ids": [[[1, 2]] * LENGTH] * 2, "distill_logprobs": [[[-1.0, -2.0]] * LENGTH] * 2},
        {"overrides": [{"set_advantage_to_zero": True, "temperature": 0.5}, {}]},
        {"generation_params": {"temperature": 1}, "images": {"any": ["thing", None, "𝔘"]}},
        {"scores": [1, -3]},
        {"inference_logprobs": None},
        {"env_id": None},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_their_environments_send_is_taken(changes: dict[str, Any]):
    scored = wire.read_one(encoded(seed=6, **changes))
    assert scored.size == 2
    assert scored.lengths == [LENGTH] * 2


def test_masks_and_logprobs_of_several_turns_are_taken():
    post = group(1, seed=7)
    post["masks"][0][8] = -100
    post["inference_logprobs"][0][8] = 1.0
    assert trained(post) == LENGTH - PROMPT - 1
    post["inference_logprobs"][0][8] = -0.25  # masked out, its logprob left as it was
    assert trained(post) == LENGTH - PROMPT - 1


def trained(post: dict[str, Any]) -> int:
    return wire.to_group(wire.read_one(json.dumps(post).encode()).data)[0].num_trained


def test_masks_of_zeros_and_ones_are_refused_with_the_line_that_mends_them():
    post = group(seed=7)
    post["masks"][1] = [int(label != wire.MASKED) for label in post["masks"][1]]
    with pytest.raises(
        GroupRefused, match=r"masks\.1: holds 0 and 1.*masks = \[id if one else -100 for id, one in zip"
    ):
        wire.read_one(json.dumps(post).encode())


def test_in_our_own_terms_what_is_trained_has_an_unknown_version():
    post = group(2, seed=8, overrides=[{}, {"set_advantage_to_zero": True}])
    first, second = wire.to_group(wire.read_one(json.dumps(post).encode()).data)
    assert first.ids == post["tokens"][0]
    assert first.trained == [False] * PROMPT + [True] * (LENGTH - PROMPT)
    assert first.logprobs == [0.0] * PROMPT + post["inference_logprobs"][0][PROMPT:]
    assert first.versions == [NO_VERSION] * PROMPT + [UNKNOWN_VERSION] * (LENGTH - PROMPT)
    assert (first.reward, second.reward) == tuple(post["scores"])
    assert second.num_trained == 0
    again = json.loads(wire.from_group([first, second], 3))
    assert again["masks"][0] == post["masks"][0]
    assert again["inference_logprobs"][0] == post["inference_logprobs"][0]
    assert (again["env_id"], set(again)) == (3, set(wire.KEYS))


def test_a_group_of_eight_thousand_tokens_is_read_in_milliseconds():
    body = encoded(8, length=1024)
    best = min(_seconds(lambda: wire.read_one(body)) for _ in range(10))
    assert best < 0.012


def _seconds(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def test_either_form_is_read_as_the_other():
    posted = wire.read_one(encoded(seed=9)).stored(5, 0).frame
    ours = wire.native(bytes(posted), 1)
    assert native.decode(ours)[0].versions == [NO_VERSION] * PROMPT + [UNKNOWN_VERSION] * (LENGTH - PROMPT)
    theirs, again = json.loads(bytes(wire.posted(posted, 0))), json.loads(bytes(wire.posted(ours, 0)))
    assert theirs.pop("inference_logprobs") == [pytest.approx(row) for row in again.pop("inference_logprobs")]
    assert theirs == again
