"""Matching requests to recorded turns, without HTTP and without an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from chat_tokenizers import chatml_tokenizer

from tandem.errors import Conflict, NotKnown, QueueFull
from tandem.rollout.sessions.sessions import Bounds, Sessions
from tandem.rollout.sessions.tree import Session, TurnNode, trajectory_row, turn_of, turn_row
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Sampling, Span


class Nowhere:
    def opened(self, session: Session) -> None: ...
    def turn(self, session: Session, turn: TurnNode) -> None: ...
    def dropped(self, session: Session) -> None: ...


@pytest.fixture(scope="module", params=["bytes", "merges"])
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return Renderer(byte_tokenizer() if request.param == "bytes" else chatml_tokenizer())


def nowhere(renderer: Renderer, bounds: Bounds | None = None, clock: Callable[[], float] = lambda: 0.0) -> Sessions:
    return Sessions(renderer, Nowhere(), bounds, clock=clock)


def complete(renderer: Renderer, text: str) -> Completion:
    ids = [*renderer.encode(text), renderer.end_id]
    return Completion(ids, [-0.5] * len(ids), [Span(3, len(ids))], "stop")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def told(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def ask(sessions: Sessions, renderer: Any, session: Session | None, messages: list[Any], answer: Any = "ok",
        tools: Any = ()) -> Any:  # fmt: skip
    """What is said is sampled at once. The turn that it became."""
    message = answer if isinstance(answer, dict) else told(answer)
    point = sessions.chat(session, messages, tools)()
    (sample,) = sessions.samples(point, 1)
    with sessions.in_progress(point.session):
        sample.keep(complete(renderer, message["content"] or "call"), message, Sampling())
    return point.session.turns[sample.id]


def conversation(sessions: Sessions, session: Session | None = None, turns: int = 3) -> Session:
    messages: list[Any] = []
    if session is not None:
        sessions.open(session)
    for number in range(turns):
        messages.append(user(f"question {number}" * 10))
        turn = ask(sessions, sessions.renderer, session, messages, f"answer {number}")
        messages.append(turn.told)
    return turn.session


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1.0, "b": {"c": [2.0, "x"]}}'}}


def call(arguments: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": CALL["function"]["arguments"] if arguments is None else arguments}
    return {**CALL, "function": function, **more}


SAME = {
    "as told": (told("hi"), told("hi")),
    "no content for none": (told(None, tool_calls=[CALL]), told("", tool_calls=[call()])),
    "arguments spaced": (told("x", tool_calls=[CALL]), told("x", tool_calls=[call('{"b":{"c":[2,"x"]},"a":1}')])),
    "arguments as an object": (told("", tool_calls=[CALL]),
                               told("", tool_calls=[call({"a": 1, "b": {"c": [2, "x"]}})])),
    "another id": (told("", tool_calls=[CALL]), told("", tool_calls=[call(id="rewritten")])),
    "without the thought": (told("hi", reasoning_content="hm"), told("hi")),
    "with the thought": (told("hi", reasoning_content="hm"), told("hi", reasoning_content="hm")),
}  # fmt: skip
OTHER = {
    "other text": (told("hi"), told("hi ")),
    "another role": (told("hi"), user("hi")),
    "another call": (told("", tool_calls=[CALL]), told("", tool_calls=[call('{"a": 2}')])),
    "no call": (told("x", tool_calls=[CALL]), told("x")),
    "a call more": (told("x", tool_calls=[CALL]), told("x", tool_calls=[CALL, CALL])),
    "another thought": (told("hi", reasoning_content="hm"), told("hi", reasoning_content="ha")),
    "a thought that was none": (told("hi"), told("hi", reasoning_content="ha")),
    "true for 1": (told("", tool_calls=[call('{"a": 1}')]), told("", tool_calls=[call('{"a": true}')])),
    "pairs for an object": (told("", tool_calls=[call('{"a": 1}')]), told("", tool_calls=[call('[["a", 1]]')])),
    "a text for a list": (told("", tool_calls=[call('{"a": ["b"]}')]), told("", tool_calls=[call('{"a": "b"}')])),
}


@pytest.mark.parametrize(("said", "again"), SAME.values(), ids=SAME.keys())
def test_it_is_the_same_history(renderer: Renderer, said: Any, again: Any) -> None:
    sessions = nowhere(renderer)
    first = ask(sessions, renderer, None, [user("a")], said)
    second = ask(sessions, renderer, None, [user("a"), again, user("b")])
    assert second.parent is first
    assert list(second.context) == renderer.glue([user("b")], first.ids[-1])


@pytest.mark.parametrize(("said", "again"), OTHER.values(), ids=OTHER.keys())
def test_it_is_another_history(renderer: Renderer, said: Any, again: Any) -> None:
    sessions = nowhere(renderer)
    first = ask(sessions, renderer, None, [user("a")], said)
    second = ask(sessions, renderer, None, [user("a"), again, user("b")])
    assert second.parent is None
    assert second.session is not first.session


def test_a_session_that_is_finished_meanwhile_takes_no_turn(renderer: Renderer) -> None:
    sessions = nowhere(renderer)
    first = ask(sessions, renderer, None, [user("a")])
    again = [user("a"), first.told, user("b")]
    point = sessions.chat(None, again, ())()
    sessions.forget(first.session)
    with pytest.raises(NotKnown), sessions.in_progress(point.session):
        pass
    point = sessions.chat(None, again, ())()
    point.session.finishing = True
    with pytest.raises(Conflict), sessions.in_progress(point.session):
        pass
    assert len(sessions) == 0


def test_a_named_session_does_not_go_on_in_another(renderer: Renderer) -> None:
    sessions = nowhere(renderer)
    one, other = sessions.new(), sessions.new()
    for session in (one, other):
        sessions.open(session)
    first = ask(sessions, renderer, one, [user("a")])
    assert ask(sessions, renderer, other, [user("a"), first.told, user("b")]).parent is None
    assert ask(sessions, renderer, None, [user("a"), first.told, user("b")]).parent is None
    assert ask(sessions, renderer, one, [user("a"), first.told, user("b")]).parent is first


def test_of_conversations_that_read_alike_the_named_one_goes_on(renderer: Renderer) -> None:
    sessions = nowhere(renderer)
    older, newer = (ask(sessions, renderer, None, [user("a")]) for _ in range(2))
    again = [user("a"), older.told, user("b")]
    assert ask(sessions, renderer, older.session, again).parent is older
    assert sessions.chat(None, again, ())().parent is newer


def test_what_is_forgotten_is_gone_on_from_no_more(renderer: Renderer) -> None:
    sessions = nowhere(renderer)
    first = ask(sessions, renderer, None, [user("a")])
    text = sessions.text(None, "once")()
    with sessions.in_progress(text.session):
        sessions.samples(text, 1)[0].keep(complete(renderer, " more"), told(" more"), Sampling())
    assert sessions.text(None, "once more and")().parent is not None
    for session in sessions.all():
        sessions.drop(session)
    assert ask(sessions, renderer, None, [user("a"), first.told, user("b")]).parent is None
    assert sessions.text(None, "once more and")().parent is None
    turns = sessions.all()[0].turns.values()
    assert sessions.turns_by_digest.keys() == {digest for turn in turns for digest, _ in turn.ends}


def test_a_turn_survives_as_a_row(renderer: Renderer) -> None:
    sessions = nowhere(renderer)
    session = conversation(sessions)
    again = Session(session.id, True)
    for turn in session.turns.values():
        again.add(turn_of(turn_row(turn), again))
    assert [turn_row(turn) for turn in again.turns.values()] == [turn_row(turn) for turn in session.turns.values()]
    (leaf,), (other,) = session.leaves, again.leaves
    made = leaf.trajectory(1.0, {"correct": 1.0}, "t")
    assert trajectory_row(made) == trajectory_row(other.trajectory(1.0, {"correct": 1.0}, "t"))
    assert made.num_unstamped == 0
    assert [made.versions[i] for i, trained in enumerate(made.trained) if trained] == [3] * made.num_trained


def test_memory_is_counted_and_given_back(renderer: Renderer) -> None:
    sessions = nowhere(renderer, Bounds(total_bytes=40_000))
    kept = [conversation(sessions, session=sessions.new()) for _ in range(4)]
    assert sessions.num_bytes == sum(session.num_bytes for session in kept)
    while sessions.num_bytes <= 40_000:
        conversation(sessions, session=sessions.new())
    with pytest.raises(QueueFull, match="bytes are open"):
        sessions.open(sessions.new())
    for session in sessions.all():
        sessions.drop(session)
    assert sessions.num_bytes == 0
    for _ in range(100):
        conversation(sessions)
    assert sessions.num_bytes <= 40_000 + max(session.num_bytes for session in sessions.all())
    assert len(sessions) > 1


def test_an_idle_session_expires_and_one_that_is_asked_does_not(renderer: Renderer) -> None:
    now = [0.0]
    sessions = nowhere(renderer, Bounds(idle_s=10), clock=lambda: now[0])
    idle, asked = conversation(sessions), conversation(sessions)
    now[0] = 8
    sessions.find(asked.id)
    with sessions.in_progress(idle):
        now[0] = 100
        sessions.expire()
        assert sessions.all() == [idle]
    now[0] = 111
    sessions.expire()
    assert (sessions.all(), sessions.expired, sessions.num_bytes) == ([], 2, 0)
