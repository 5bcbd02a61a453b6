"""A gateway's open sessions: match requests to recorded turns, record completions, take rewards.

consumes: requests, completions, rewards   waits for: nothing
produces: points to sample from, and in the end a session's trajectories: one per branch

Nothing here is asynchronous, so requests of one session cannot interleave inside a method.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tandem.errors import Conflict, NotKnown, QueueFull
from tandem.rollout.sessions.token_versions import SessionRecord
from tandem.rollout.sessions.tree import (
    Kind,
    Session,
    Sizes,
    Tools,
    TurnNode,
    call_ids,
    chain,
    link,
    same_thoughts,
    starts,
)
from tandem.types import Completion, Message, Sampling, Thought, Trajectory


class SessionRenderer(Protocol):
    """The renderer methods that sessions use."""

    @property
    def end_ids(self) -> frozenset[int]: ...
    def check_chars(self, texts: Iterable[str]) -> None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...
    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]: ...
    def glue(self, messages: Sequence[Message], last_id: int, tools: Tools = ()) -> list[int]: ...
    def thought(self, ids: Sequence[int], stop: Sequence[str] = ()) -> Thought | None: ...


class SessionSink(Protocol):
    """Where changes of sessions are stored. Sessions does not wait for the writes."""

    def opened(self, session: Session) -> None: ...
    def turn(self, session: Session, turn: TurnNode) -> None: ...
    def dropped(self, session: Session) -> None: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    sessions: int = 10_000
    """Open at a time. At the limit an automatic session is closed for a newer one."""
    turns: int = 2_000
    """In one session."""
    branches: int = 256
    """In one session."""
    session_bytes: int = 64 * 2**20
    total_bytes: int = 2 * 2**30
    idle_s: float = 3600.0
    """A session without a request for so long is dropped."""


@dataclass(frozen=True, slots=True)
class Point:
    """The point in a session's tree from which a request samples; its n samples share it."""

    session: Session
    parent: TurnNode | None
    kept: int
    kind: Kind
    said: list[Message]
    context: list[int]
    prompt: list[int]
    history: bytes
    """For chat the digest of the request's conversation, otherwise the prompt's bytes."""
    history_size: int


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """A turn that is being sampled."""

    point: Point
    sessions: Sessions
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    @property
    def session(self) -> str:
        return self.point.session.id

    @property
    def prompt(self) -> list[int]:
        return self.point.prompt

    def keep(self, completion: Completion, shown: Message, sampling: Sampling) -> None:
        self.sessions.add(self.point, self.id, completion, shown, sampling)


class Sessions:
    def __init__(
        self,
        renderer: SessionRenderer,
        sink: SessionSink,
        bounds: Bounds | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.bounds, self.num_bytes = bounds or Bounds(), 0
        self.branched = self.expired = self.made = 0
        self.renderer, self._sink, self._clock = renderer, sink, clock
        self._open_sessions: OrderedDict[str, Session] = OrderedDict()
        """In order of use, the latest last."""
        self.turns_by_digest: dict[bytes, list[tuple[TurnNode, int]]] = {}
        self._sizes: dict[tuple[str, Kind], Sizes] = {}
        """Sizes of recorded conversations in text and in ids, to look up the prefixes of a prompt."""
        self.record = SessionRecord()

    # --- sessions

    def __len__(self) -> int:
        return len(self._open_sessions)

    def now(self) -> float:
        return self._clock()

    def all(self) -> list[Session]:
        return list(self._open_sessions.values())

    def new(
        self, *, automatic: bool = False, group: str = "", group_size: int = 0, task_id: str = "", session_id: str = ""
    ) -> Session:
        """Return a new session that is not open yet."""
        now = self._clock()
        return Session(session_id or uuid.uuid4().hex, automatic, group, group_size, task_id, now, now)

    def open(self, session: Session) -> None:
        self._make_room()
        self._open_sessions[session.id] = session
        self.made += 1
        self._sink.opened(session)

    def take_back(self, session: Session) -> None:
        """Reopen a session of an earlier process, with its turns."""
        self._open_sessions[session.id] = session
        self.num_bytes += session.num_bytes
        for turn in session.turns.values():
            self._index(session, turn)

    def find(self, session_id: str) -> Session:
        self.expire()
        session = self._open_sessions.get(session_id)
        if session is None:
            raise NotKnown(
                f"no open session '{session_id:.80}': it is finished, expired, or never existed; POST /sessions"
            )
        self._touch(session)
        return session

    def drop(self, session: Session) -> None:
        """Remove a session from memory and from disk."""
        self.forget(session)
        self._sink.dropped(session)

    def forget(self, session: Session) -> None:
        """Remove a session from memory only."""
        if self._open_sessions.pop(session.id, None) is None:
            return
        self.num_bytes -= session.num_bytes
        for turn in session.turns.values():
            self.record.remove(turn)
            for digest, _ in turn.ends:
                left = [each for each in self.turns_by_digest.get(digest, ()) if each[0].session is not session]
                if left:
                    self.turns_by_digest[digest] = left
                else:
                    self.turns_by_digest.pop(digest, None)
            for size in _sizes_of(turn):
                self._sizes[session.scope, turn.kind].remove(size)
        if session.scope:
            for kind in ("text", "ids"):
                self._sizes.pop((session.scope, kind), None)

    def expire(self) -> None:
        oldest = self._clock() - self.bounds.idle_s
        while self._open_sessions:
            session = next(iter(self._open_sessions.values()))
            if session.used > oldest:
                return
            if session.running or session.finishing:
                self._touch(session)
            else:
                self.expired += 1
                self.drop(session)

    # --- match a request to a turn

    def chat(self, session: Session | None, messages: Sequence[Message], tools: Tools) -> Callable[[], Point]:
        """Return a function that makes the point. The function may take long and changes no session."""
        self.renderer.check_chars(message.get("content") or "" for message in messages)
        self.expire()
        digests = chain(session.scope if session else "", tools, messages)
        for count in range(len(messages), 0, -1):
            known = [turn for turn, _ in self._known(digests[count], session) if same_thoughts(turn, messages)]
            if known:
                ids = call_ids(messages[count - 1])
                parent = max(known, key=lambda turn: call_ids(turn.told) == ids)  # the newest of the best matches
                context = partial(self.renderer.glue, messages[count:], parent.ids[-1], tools)
                break
        else:
            count, parent, context = 0, None, partial(self.renderer.prompt, messages, tools)
        kept = len(parent.ids) if parent else 0
        return partial(
            self._point, session, parent, kept, "chat", list(messages[count:]), context, digests[-1], len(messages)
        )

    def text(self, session: Session | None, prompt: str | list[int]) -> Callable[[], Point]:
        """Like `chat`, for a prompt as text or ids."""
        if isinstance(prompt, str):
            self.renderer.check_chars([prompt])
        self.expire()
        kind: Kind = "text" if isinstance(prompt, str) else "ids"
        data = prompt.encode() if isinstance(prompt, str) else array("i", prompt).tobytes()
        scope = session.scope if session else ""
        sizes = self._sizes.get((scope, kind), Sizes()).in_order
        for size, digest in reversed(starts(scope, kind, data, sizes)):
            for turn, kept in self._known(digest, session):
                if kind == "ids":
                    assert not isinstance(prompt, str)
                    rest = partial(list[int], prompt[size // 4 :])
                    return partial(self._point, session, turn, kept, kind, [], rest, data, len(data))
                if (continuation := self._continuation(turn, data[size:].decode())) is not None:
                    kept, new = continuation
                    said: list[Message] = [{"role": "user", "content": new}]
                    ids = partial(self.renderer.encode, new)
                    return partial(self._point, session, turn, kept, kind, said, ids, data, len(data))
        whole = partial(self.renderer.encode, prompt) if isinstance(prompt, str) else partial(list[int], prompt)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
        return partial(self._point, session, None, 0, kind, said, whole, data, len(data))

    def samples(self, point: Point, count: int) -> list[PendingTurn]:
        session, bounds = point.session, self.bounds
        leaves = len(session.leaves)
        if session.finishing:
            raise Conflict(f"session '{session.id}' is being finished")
        if len(session.turns) + count > bounds.turns or session.num_bytes > bounds.session_bytes:
            raise Conflict(
                f"session '{session.id}' is full: {len(session.turns)} turns, {session.num_bytes} bytes; "
                f"{bounds.turns} and {bounds.session_bytes} are allowed. POST its reward and open another session"
            )
        replaces = point.parent is not None and not point.parent.children
        if leaves + count - replaces > bounds.branches:
            raise Conflict(f"session '{session.id}' has {leaves} branches, {bounds.branches} are allowed")
        if session.id not in self._open_sessions:
            self._make_room()
        return [PendingTurn(point, self) for _ in range(count)]

    @contextmanager
    def in_progress(self, session: Session) -> Generator[None]:
        if session.finishing:
            raise Conflict(f"session '{session.id}' is being finished")
        if session.id not in self._open_sessions:
            if session.turns or not session.automatic:
                self.find(session.id)  # it was removed meanwhile: raises NotKnown
            self.open(session)
        session.running += 1
        try:
            yield
        finally:
            session.running -= 1
            self._touch(session)

    def add(self, point: Point, turn_id: str, completion: Completion, shown: Message, sampling: Sampling) -> None:
        session, kind = point.session, point.kind
        if session.id not in self._open_sessions:
            return
        thought = self.renderer.thought(completion.ids, sampling.stop) if kind == "chat" else None
        turn = TurnNode(
            turn_id, session, point.parent, point.kept, kind, point.said, shown, array("i", point.context),
            array("i", completion.ids), array("d", completion.logprobs), completion.spans, completion.finish_reason,
            thought, sampling=(sampling.temperature, sampling.top_p, sampling.top_k),
        )  # fmt: skip
        self._set_ends(turn, point)
        self.branched += bool(point.parent is not None and point.parent.children)
        before = session.num_bytes
        session.add(turn)
        self.num_bytes += session.num_bytes - before
        self._index(session, turn)
        self._sink.turn(session, turn)

    # --- rewards

    def judge(
        self, session: Session, reward: float, metrics: Mapping[str, float], branch: str = ""
    ) -> dict[str, tuple[float, dict[str, float]]]:
        """Return the session's rewards with this one added, by the last turn of each branch."""
        leaves = [turn.id for turn in session.leaves]
        if session.running:
            raise Conflict(f"session '{session.id}' has {session.running} requests in progress; wait for them")
        if session.finishing:
            raise Conflict(f"session '{session.id}' is being finished")
        if not leaves:
            raise Conflict(f"session '{session.id}' has no samples to reward")
        given = (reward, dict(metrics))
        if branch:
            if branch not in session.turns:
                raise NotKnown(f"session '{session.id}' has no turn '{branch:.80}'", field="branch")
            if branch not in leaves:
                raise Conflict(f"turn '{branch}' has later turns; name a branch by its last turn", field="branch")
            return {**session.rewards, branch: given}
        return {leaf: session.rewards.get(leaf, given) for leaf in leaves}

    def trajectories(
        self, session: Session, rewards: Mapping[str, tuple[float, dict[str, float]]]
    ) -> list[tuple[str, Trajectory]]:
        """Return the rewarded branches as trajectories, oldest first, each with its last turn."""
        return [
            (turn.id, turn.trajectory(*rewards[turn.id], session.task_id))
            for turn in session.leaves
            if turn.id in rewards
        ]

    # --- internals

    def _known(self, digest: bytes, session: Session | None) -> list[tuple[TurnNode, int]]:
        """Return the turns with this digest, newest first."""
        return [
            (turn, kept)
            for turn, kept in reversed(self.turns_by_digest.get(digest, ()))
            if turn.session is (session or turn.session) and not turn.session.finishing
        ]

    def _point(
        self, session: Session | None, parent: TurnNode | None, kept: int, kind: Kind, said: list[Message],
        encoded: Callable[[], list[int]], history: bytes, history_size: int,
    ) -> Point:  # fmt: skip
        context = encoded()
        session = parent.session if parent else session or self.new(automatic=True)
        prompt = [*parent.prompt(kept), *context] if parent else context
        return Point(session, parent, kept, kind, said, context, prompt, history, history_size)

    def _continuation(self, turn: TurnNode, rest: str) -> tuple[int, str] | None:
        """Return how many of a turn's ids the text continues, and the text's new part; None if it continues none. A
        turn ends with text that the client did not see: the end-of-turn token or the stop string. The client's next
        prompt may repeat that or omit it."""
        ids, shown, decode = turn.ids.tolist(), str(turn.told["content"]), self.renderer.decode
        text = decode(ids)
        if ids[-1] in self.renderer.end_ids or (text != shown and decode(ids[:-1]) == shown):
            hidden = decode(ids[-1:], skip_special=False)
        else:
            hidden = text.removeprefix(shown)
        if rest.startswith(hidden):
            return len(ids), rest[len(hidden) :]
        for kept in range(len(ids) - 1, 0, -1):
            text = decode(ids[:kept])
            if text == shown:
                return kept, rest
            if len(text) < len(shown):
                break
        return None

    def _set_ends(self, turn: TurnNode, point: Point) -> None:
        scope = point.session.scope
        if turn.kind == "chat":
            turn.ends, turn.text_size = [(link(point.history, turn.told), len(turn.ids))], point.history_size + 1
            return
        if turn.kind == "text":
            ends = [(point.history + str(turn.told["content"]).encode(), len(turn.ids))]
        else:
            ends = [(point.history + turn.ids.tobytes(), len(turn.ids))]
            if turn.ids[-1] in self.renderer.end_ids and len(turn.ids) > 1:
                ends.append((point.history + turn.ids[:-1].tobytes(), len(turn.ids) - 1))
        for data, kept in ends:
            ((size, digest),) = starts(scope, turn.kind, data, [len(data)])
            turn.ends.append((digest, kept))
            turn.text_size = max(turn.text_size, size)

    def _index(self, session: Session, turn: TurnNode) -> None:
        self.record.add(turn)
        for digest, kept in turn.ends:
            self.turns_by_digest.setdefault(digest, []).append((turn, kept))
        for size in _sizes_of(turn):
            self._sizes.setdefault((session.scope, turn.kind), Sizes()).add(size)

    def _touch(self, session: Session) -> None:
        session.used = self._clock()
        if session.id in self._open_sessions:
            self._open_sessions.move_to_end(session.id)

    def _make_room(self) -> None:
        """Drop idle automatic sessions, longest unused first, until the bounds hold."""
        bounds = self.bounds
        if len(self._open_sessions) < bounds.sessions and self.num_bytes <= bounds.total_bytes:
            return
        idle = (
            each
            for each in list(self._open_sessions.values())
            if each.automatic and not (each.running or each.finishing)
        )
        while len(self._open_sessions) >= bounds.sessions or self.num_bytes > bounds.total_bytes:
            oldest = next(idle, None)
            if oldest is None:
                raise QueueFull(
                    f"{len(self._open_sessions)} sessions of {self.num_bytes} bytes are open; {bounds.sessions} and "
                    f"{bounds.total_bytes} are allowed. POST rewards for some, or DELETE them"
                )
            self.expired += 1
            self.drop(oldest)


def _sizes_of(turn: TurnNode) -> list[int]:
    if turn.kind == "chat":
        return []
    if turn.kind == "text":
        return [turn.text_size]
    return [turn.text_size - 4 * (len(turn.ids) - kept) for _, kept in turn.ends]


def summary(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "automatic": session.automatic,
        "group": session.group,
        "group_size": session.group_size,
        "task_id": session.task_id,
        "created": session.created,
        "used": session.used,
        "running": session.running,
        "turns": len(session.turns),
        "branches": [turn.id for turn in session.leaves],
        "bytes": session.num_bytes,
    }
