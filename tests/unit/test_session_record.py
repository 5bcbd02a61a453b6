"""The gateway's record proves versions of posted sequences exactly as far as they were sampled there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from tandem.rollout.sessions.token_versions import Proven, SessionRecord
from tandem.rollout.sessions.tree import Session, TurnNode
from tandem.types import NO_VERSION, UNKNOWN_VERSION, Span

N, U = NO_VERSION, UNKNOWN_VERSION
PROMPT = [1, 2, 3]


def turn(
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    *,
    logprobs: Sequence[float] = (),
    context: Sequence[int] = PROMPT,
    parent: TurnNode | None = None,
    kept: int = 0,
    sampling: tuple[float, float, int] = (1.0, 1.0, 0),
) -> TurnNode:
    logprobs = logprobs or [-0.1 * id for id in ids]
    return TurnNode(
        f"{ids}{spans}", Session("s", True), parent, kept, "ids", [], {"role": "assistant", "content": ""},
        array("i", context), array("i", ids), array("d", logprobs), [Span(*span) for span in spans], "stop",
        sampling=sampling,
    )  # fmt: skip


def record(*turns: TurnNode) -> SessionRecord:
    made = SessionRecord()
    for each in turns:
        made.add(each)
    return made


def prove(made: SessionRecord, ids: Sequence[int], trained: str, logprobs: Sequence[float] | None = ()) -> Proven:
    """`trained`: a letter a token, x where the loss counts."""
    if logprobs is not None:
        logprobs = logprobs or [-0.1 * id if one == "x" else 0.0 for id, one in zip(ids, trained, strict=True)]
    return made.prove(ids, [one == "x" for one in trained], logprobs)


ONE = turn([10, 11, 12, 13], [(4, 2), (5, 2)])


@pytest.mark.parametrize(
    ("ids", "trained", "versions"),
    [
        ([*PROMPT, 10, 11, 12, 13], "...xxxx", [N, N, N, 4, 4, 5, 5]),
        ([*PROMPT, 10, 11, 12], "...xxx", [N, N, N, 4, 4, 5]),
        ([*PROMPT, 10, 11, 12, 13, 0, 0], "...xxxx..", [N, N, N, 4, 4, 5, 5, N, N]),
        ([*PROMPT, 10, 11, 12, 13, 99], "...xxxxx", [N, N, N, 4, 4, 5, 5, U]),
        ([*PROMPT, 10, 11, 12, 13], "....x.x", [N, N, N, N, 4, N, 5]),
        ([*PROMPT, 10, 77, 12, 13], "...xxxx", [N, N, N, 4, U, U, U]),
        ([7, *PROMPT, 10, 11, 12, 13], "....xxxx", [N, N, N, N, U, U, U, U]),
        ([1, 2, 10, 11, 12, 13], "..xxxx", [N, N, U, U, U, U]),
        (PROMPT, "...", [N, N, N]),
    ],
    ids=["whole", "cut", "padded", "end added", "masked", "edited", "prompt longer", "prompt shorter", "prompt alone"],
)
def test_a_token_is_proven_as_far_as_the_sequence_is_what_was_sampled(
    ids: list[int], trained: str, versions: list[int]
):
    assert prove(record(ONE), ids, trained).versions == versions


def test_each_turn_of_a_conversation_has_its_own_versions():
    second = turn([20, 21], [(6, 2)], context=[50, 51], parent=ONE, kept=3)
    ids = [*PROMPT, 10, 11, 12, 50, 51, 20, 21]
    assert prove(record(ONE, second), ids, "...xxx..xx").versions == [N, N, N, 4, 4, 5, N, N, 6, 6]


def test_equal_ids_are_told_apart_by_their_logprobs():
    old = turn([10, 11], [(1, 2)], logprobs=[-0.5, -0.25])
    new = turn([10, 11], [(2, 2)], logprobs=[-0.5, -0.125])
    made = record(old, new)
    assert prove(made, [*PROMPT, 10, 11], "...xx", [0, 0, 0, -0.5, -0.25]).versions[3:] == [1, 1]
    assert prove(made, [*PROMPT, 10, 11], "...xx", [0, 0, 0, -0.5, -0.125]).versions[3:] == [2, 2]
    assert prove(made, [*PROMPT, 10, 11], "...xx", [0, 0, 0, -0.5, -0.0625]).versions[3:] == [U, U]


def test_what_two_versions_sampled_alike_is_of_neither():
    made = record(turn([10, 11], [(1, 2)]), turn([10, 11], [(1, 1), (2, 1)]))
    assert prove(made, [*PROMPT, 10, 11], "...xx").versions[3:] == [1, U]


def test_logprobs_that_were_rewritten_end_the_proof():
    assert prove(record(ONE), [*PROMPT, 10, 11, 12, 13], "...xxxx", [0, 0, 0, -1.0, -1.1, -9, -1.3]).versions[3:] == [
        4, 4, U, U,
    ]  # fmt: skip


def test_a_sequence_without_logprobs_gets_those_that_were_recorded():
    found = prove(record(ONE), [*PROMPT, 10, 11, 12, 13], "...xx.x", None)
    assert found.versions == [N, N, N, 4, 4, N, 5]
    assert found.logprobs == pytest.approx([0, 0, 0, -1.0, -1.1, 0, -1.3])
    assert prove(record(ONE), [*PROMPT, 10, 11, 12, 99], "...xxxx", None).logprobs is None


def test_without_logprobs_equal_ids_of_two_versions_are_of_neither():
    made = record(turn([10], [(1, 1)], logprobs=[-0.5]), turn([10], [(2, 1)], logprobs=[-0.25]))
    found = prove(made, [*PROMPT, 10], "...x", None)
    assert (found.versions[3], found.logprobs) == (U, [0, 0, 0, -0.25])


def test_it_says_how_what_it_recognises_was_sampled():
    made = record(turn([10], [(1, 1)], sampling=(0.7, 0.9, 5)), turn([12], [(1, 1)]))
    assert prove(made, [*PROMPT, 10], "...x").samplings == {(0.7, 0.9, 5)}


def test_what_is_forgotten_proves_nothing_and_leaves_nothing():
    twin = turn([10, 11, 12, 13], [(9, 4)])
    made = record(ONE, twin)
    made.remove(twin)
    assert prove(made, [*PROMPT, 10, 11, 12, 13], "...xxxx").versions[3:] == [4, 4, 5, 5]
    made.remove(ONE)
    assert prove(made, [*PROMPT, 10, 11, 12, 13], "...xxxx").versions[3:] == [U] * 4
    assert not made.turns
    assert not made.sizes.in_order
