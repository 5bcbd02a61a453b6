"""The session store when the disk is full for a moment."""

from __future__ import annotations

import asyncio
import logging
from array import array
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import StoreFull
from tandem.io.request_key import RequestKey
from tandem.rollout.sessions import store as session_store
from tandem.rollout.sessions.store import SessionStore
from tandem.rollout.sessions.tree import Session, TurnNode
from tandem.types import Span


def turn(session: Session, name: str, parent: TurnNode | None = None) -> TurnNode:
    told = {"role": "assistant", "content": "x"}
    made = TurnNode(
        name, session, parent, 1 if parent else 0, "ids", [], told, array("i", [1]), array("i", [2]),
        array("d", [-1.0]), [Span(0, 1)], "stop",
    )  # fmt: skip
    session.add(made)
    return made


def no_room(*_: Any) -> None:
    raise StoreFull("no room")


def test_what_went_on_from_a_turn_that_was_not_written_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    store, session = SessionStore(tmp_path), Session("s", False, created=1.0, used=1.0)
    store.opened(session)
    first = turn(session, "a")
    store.turn(session, first)
    submit = store.db.submit
    monkeypatch.setattr(store.db, "submit", lambda _: submit(no_room))
    lost = turn(session, "b", first)
    store.turn(session, lost)
    monkeypatch.undo()
    child = turn(session, "c", lost)
    for each in (child, turn(session, "d", child), turn(session, "e", first)):
        store.turn(session, each)
    store.close()
    assert "turn b of session s was not written to disk: StoreFull: no room" in caplog.text
    again = SessionStore(tmp_path)
    with caplog.at_level(logging.WARNING):
        (found,) = again.open_sessions(2.0)
    again.close()
    assert list(found.turns) == ["a", "e"]
    assert [leaf.id for leaf in found.leaves] == ["e"]
    assert "turn c of session s is left out" in caplog.text


def test_a_session_is_not_answered_for_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, session, once = SessionStore(tmp_path), Session("s", False, created=1.0, used=1.0), RequestKey("k", b"d")
    monkeypatch.setattr(session_store, "_open", no_room)
    store.opened(session)
    with pytest.raises(StoreFull):
        asyncio.run(store.answered_open(session, once, {}))
    assert store.answered(once) is None
    monkeypatch.undo()
    asyncio.run(store.answered_open(session, once, {"id": "s"}))
    assert ([each.id for each in store.open_sessions(2.0)], store.answered(once)) == (["s"], {"id": "s"})
    store.close()
