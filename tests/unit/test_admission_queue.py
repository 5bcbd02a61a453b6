"""The embedded engine's admission queue: which waiting request is prefilled next."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.engine.hf.admission_queue import AdmissionQueue, QueuedRequest
from tandem.serve.openai.requests import ChatRequest
from tandem.types import Sampling


def request(prompt: int = 4, *, tokens: int = 6, urgent: bool = False, mark: int = 0, share: str = "") -> QueuedRequest:
    answer: Any = None
    sampling = Sampling(max_tokens=tokens, urgent=urgent, share=share)
    return QueuedRequest([mark] * prompt, sampling, frozenset(), answer, None)


def waiting(
    *requests: QueuedRequest, max_running: int = 4, positions: int = 1000, prefill_tokens: int = 1000
) -> AdmissionQueue:
    made = AdmissionQueue(max_running=max_running, positions=positions, prefill_tokens=prefill_tokens)
    for each in requests:
        made.add(each)
    return made


def test_first_in_first_out_as_many_as_there_are_rows():
    asked = [request(mark=number) for number in range(6)]
    line = waiting(*asked)
    assert line.next_wave([]) == asked[:4]
    assert [*line] == asked[4:]
    assert line.next_wave(asked[:3]) == asked[4:5]


@pytest.mark.parametrize(
    ("positions", "running", "together"), [(30, 0, 3), (29, 0, 2), (30, 1, 2), (9, 0, 1), (9, 1, 0)]
)
def test_only_those_that_have_room_for_all_of_their_tokens(positions: int, running: int, together: int):
    """Who is alone always has."""
    line = waiting(*(request() for _ in range(4)), positions=positions)
    assert len(line.next_wave([request() for _ in range(running)])) == together


def test_a_row_is_as_long_as_the_longest_that_runs():
    line = waiting(request(tokens=6), request(tokens=46), positions=100)
    assert len(line.next_wave([])) == 2
    line = waiting(request(tokens=6), positions=99)
    assert line.next_wave([request(tokens=46)]) == []


@pytest.mark.parametrize(("marks", "together"), [((0, 1, 2), 2), ((0, 0, 1), 3), ((0, 0, 0), 3)])
def test_one_prefill_takes_so_many_positions_and_equal_prompts_once(marks: tuple[int, ...], together: int):
    line = waiting(*(request(mark=mark) for mark in marks), prefill_tokens=8)
    assert len(line.next_wave([])) == together


def test_what_was_sampled_before_a_version_is_prefilled_with_the_prompt():
    long = request(mark=1)
    long.ids.extend([7] * 5)
    assert len(waiting(request(), long, prefill_tokens=18).next_wave([])) == 2
    assert len(waiting(request(), long, prefill_tokens=17).next_wave([])) == 1
    assert len(waiting(long, request(), prefill_tokens=17).next_wave([])) == 1


def test_one_that_could_come_at_once_waits_a_little_for_others():
    running = [request() for _ in range(15)]
    line = waiting(*(request() for _ in range(5)), max_running=16)
    waves = [len(line.next_wave(running)) for _ in range(8)]
    assert waves == [0, 0, 0, 1] * 2
    line.next_wave(running)
    line.add(request(urgent=True))  # who passes takes nobody's turn away
    assert [len(line.next_wave(running)) for _ in range(3)] == [1, 0, 1]
    line.add(request())
    assert len(line.next_wave(running[1:])) == 2  # an eighth of all rows has ended


def test_who_is_urgent_comes_first_alone_beside_all_rows_and_nobody_until_it_has_ended():
    others, canaries = [request() for _ in range(2)], [request(urgent=True) for _ in range(2)]
    line, running = waiting(*others, *canaries), [request() for _ in range(4)]
    assert [*line] == [*canaries, *others]
    assert line.next_wave(running) == canaries[:1]
    assert line.next_wave([*running, canaries[0]]) == []
    assert line.next_wave(running) == canaries[1:]
    assert line.next_wave(running[:2]) == others


def test_who_is_urgent_waits_for_room_and_nobody_passes_it():
    line = waiting(request(), request(urgent=True), positions=20)
    assert line.next_wave([request(), request()]) == []
    assert len(line) == 2
    assert line.next_wave([request()])[0].sampling.urgent
    for ours, theirs in ((26, 6), (6, 26)):
        line = waiting(request(tokens=ours, urgent=True), positions=59)
        assert line.next_wave([request(tokens=theirs)]) == []


def test_those_that_ran_come_before_those_that_have_not_and_urgent_ones_before_both():
    ran = [request(mark=mark, urgent=mark in (2, 4)) for mark in (1, 2, 3, 4)]
    came = [request(mark=5), request(mark=6, urgent=True)]
    line = waiting(*came)
    line.put_back(ran)
    assert [each.prompt[0] for each in line] == [2, 4, 6, 1, 3, 5]
    line.keep(lambda each: each.prompt[0] not in (2, 4))
    assert line.next_wave([]) == [came[1]]
    assert line.next_wave([]) == [ran[0], ran[2], came[0]]


def test_the_share_with_the_fewest_rows_is_next():
    many, few = [request(share="many") for _ in range(6)], [request(share="few") for _ in range(2)]
    line = waiting(*many, *few, max_running=4)
    assert line.next_wave([]) == [many[0], few[0], many[1], few[1]]
    line = waiting(*few, max_running=4)
    assert line.next_wave(many[:3]) == few[:1]


def test_a_share_without_a_row_is_given_one_of_a_share_that_has_several():
    running, late = [request(share=share) for share in "aaab"], request(share="c")
    for ids, each in zip(([1, 2], [1], [1, 2, 3], []), running, strict=True):
        each.ids.extend(ids)
    line = waiting(request(share="a"), late)
    assert line.makes_room(running) is running[1], "of the share with the most, the one that is begun again cheapest"
    line.put_back([running.pop(1)])
    assert line.makes_room(running) is None, "there is room now"
    assert line.next_wave(running) == [late]
    assert line.makes_room([*running, late]) is None, "each share has a row"


def test_nobody_makes_room_where_no_share_has_two_rows_where_there_is_room_or_for_one_s_own_share():
    assert waiting(request(share="e")).makes_room([request(share=share) for share in "abcd"]) is None
    assert waiting(request(share="b")).makes_room([request(share="a")] * 3) is None
    assert waiting(request(share="a")).makes_room([request(share="a")] * 4) is None
    assert waiting(request()).makes_room([request() for _ in range(4)]) is None
    assert waiting(request(share="b"), request(urgent=True)).makes_room([request(share="a")] * 4) is None
    full = waiting(request(tokens=46, share="b"), positions=100)
    assert full.makes_room(running := [request(share="a"), request(share="a")]) is running[0]


def test_requests_of_one_user_are_one_share_and_others_each_their_own():
    def share(**more: str) -> str:
        messages = [{"role": "user", "content": "hi"}]
        return ChatRequest.model_validate({"model": "m", "messages": messages, **more}).sampling(1).share

    assert share(user="ada") == share(user="ada") == share(safety_identifier="ada") == "ada"
    assert share(user="bob") != share(user="ada")
    assert share() != share()
