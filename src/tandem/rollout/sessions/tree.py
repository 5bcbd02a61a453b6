"""A session as a tree of turns in token space: sampled tokens are never tokenised again.

A turn is what the engine was given beyond its parent (`context`) and what it sampled (`ids`). A request continues the
turn whose conversation, as the client saw it, is the longest prefix of the request's. A conversation that differs from
an earlier one starts a branch; one that matches no turn starts a root.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, cast

from tandem.types import NO_VERSION, FinishReason, Message, Span, Thought, Trajectory

Kind: TypeAlias = Literal["chat", "text", "ids"]
Tools: TypeAlias = Sequence[Mapping[str, Any]]

_TURN_BYTES = 1000  # overhead of a turn beyond its tokens and text


@dataclass(slots=True, eq=False)
class TurnNode:
    id: str
    session: Session
    parent: TurnNode | None
    kept: int
    """How many of the parent's sampled ids this turn follows; fewer than all if the client omitted the end."""
    kind: Kind
    said: list[Message]
    """The client's messages since the parent."""
    told: Message
    """The reply as the client saw it, and as its next request should repeat it."""
    context: array[int]
    ids: array[int]
    logprobs: array[float]
    spans: list[Span]
    finish_reason: FinishReason
    thought: Thought | None = None
    ends: list[tuple[bytes, int]] = field(default_factory=list[tuple[bytes, int]])
    """Digests of the conversations that end here, and how many of `ids` each includes."""
    text_size: int = 0
    """Size of the conversation up to here: in messages, bytes or bytes of ids, by `kind`."""
    children: int = 0
    sampling: tuple[float, float, int] = (1.0, 1.0, 0)
    """Temperature, top_p and top_k of its sampling."""
    found_by: tuple[int, bytes] = (0, b"")
    """Size and digest of its prompt in the SessionRecord."""

    @property
    def num_bytes(self) -> int:
        text = sum(len(json.dumps(message, ensure_ascii=False)) for message in (*self.said, self.told))
        return _TURN_BYTES + 4 * (len(self.context) + len(self.ids)) + 8 * len(self.logprobs) + text

    def path(self) -> list[tuple[TurnNode, int]]:
        """Return the turns from the root to here, each with how many of its sampled ids count."""
        found: list[tuple[TurnNode, int]] = []
        turn, kept = self, len(self.ids)
        while True:
            found.append((turn, kept))
            if turn.parent is None:
                return found[::-1]
            turn, kept = turn.parent, turn.kept

    def prompt(self, kept: int) -> list[int]:
        """Return all ids up to here, with only the first `kept` of this turn's samples."""
        ids: list[int] = []
        for turn, count in self.path():
            ids += turn.context
            ids += turn.ids[: kept if turn is self else count]
        return ids

    def opening(self) -> list[int]:
        """Return the prompt from which the engine sampled this turn."""
        return [*(self.parent.prompt(self.kept) if self.parent else ()), *self.context]

    def trajectory(self, reward: float, metrics: Mapping[str, float], task_id: str) -> Trajectory:
        """Return the branch that ends here as a trajectory: prompts and samples from the root on."""
        made = Trajectory([], [], [], [], reward, metrics=dict(metrics), task_id=task_id)
        for turn, kept in self.path():
            glue = len(turn.context)
            versions = [span.version for span in turn.spans for _ in range(span.count)]
            made.ids += [*turn.context, *turn.ids[:kept]]
            made.trained += [False] * glue + [True] * kept
            made.logprobs += [0.0] * glue + list(turn.logprobs[:kept])
            made.versions += [NO_VERSION] * glue + versions[:kept]
            made.messages += [*turn.said, turn.told]
            if turn.thought is not None:
                made.thinking_tokens += min(turn.thought.num_tokens, kept)
                made.unclosed = made.unclosed or not turn.thought.closed
        made.status = "truncated" if self.finish_reason == "length" else "finished"
        return made


@dataclass(slots=True, eq=False)
class Session:
    id: str
    automatic: bool
    """Opened for a conversation that named no session."""
    group: str = ""
    group_size: int = 0
    """Sessions in its group; 0: those opened before the last of them finished."""
    task_id: str = ""
    created: float = 0.0
    used: float = 0.0
    running: int = 0
    finishing: bool = False
    num_bytes: int = 0
    turns: dict[str, TurnNode] = field(default_factory=dict[str, TurnNode])
    rewards: dict[str, tuple[float, dict[str, float]]] = field(
        default_factory=dict[str, tuple[float, dict[str, float]]]
    )
    """Rewards of branches, by their last turn."""

    @property
    def scope(self) -> str:
        """The conversations that a request is matched with: this session's, or those of all automatic sessions."""
        return "" if self.automatic else self.id

    @property
    def leaves(self) -> list[TurnNode]:
        return [turn for turn in self.turns.values() if not turn.children]

    def add(self, turn: TurnNode) -> None:
        if turn.parent is not None:
            turn.parent.children += 1
        self.turns[turn.id] = turn
        self.num_bytes += turn.num_bytes


class Sizes:
    """A sorted multiset of sizes."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.in_order: list[int] = []

    def add(self, size: int) -> None:
        if size not in self._counts:
            insort(self.in_order, size)
        self._counts[size] = self._counts.get(size, 0) + 1

    def remove(self, size: int) -> None:
        self._counts[size] -= 1
        if not self._counts[size]:
            del self._counts[size]
            del self.in_order[bisect_left(self.in_order, size)]


# --- conversations as digests


def chain(scope: str, tools: Tools, messages: Sequence[Message]) -> list[bytes]:
    """Return digests: entry k is of the tools and the first k messages, in the parts that clients repeat unchanged."""
    digests = [_digest(b"", json.dumps([scope, "chat", list(tools)]).encode())]
    for message in messages:
        digests.append(link(digests[-1], message))
    return digests


def link(before: bytes, message: Message) -> bytes:
    """Extend a digest by a message, without its thought, which many clients drop, and call ids, which some rewrite."""
    calls = [
        [call["function"]["name"], _arguments(call["function"]["arguments"])]
        for call in cast("list[dict[str, Any]]", message.get("tool_calls") or [])
    ]
    told = [message["role"], message.get("content") or "", message.get("name"), message.get("tool_call_id"), calls]
    return _digest(before, json.dumps(told, sort_keys=True).encode())


def starts(scope: str, kind: Kind, data: bytes, sizes: Sequence[int]) -> list[tuple[int, bytes]]:
    """Return digests of the prefixes of `data` with these sizes, which are sorted."""
    running, at = blake2b(f"{scope} {kind} ".encode(), digest_size=16), 0
    found: list[tuple[int, bytes]] = []
    for size in sizes:
        if size > len(data):
            break
        running.update(data[at:size])
        at = size
        found.append((size, running.copy().digest()))
    return found


def same_thoughts(turn: TurnNode, messages: Sequence[Message]) -> bool:
    """Return whether the thoughts that the client repeats equal those that it received."""
    at: TurnNode | None = turn
    while at is not None:
        again = messages[at.text_size - 1].get("reasoning_content")
        if again and again != at.told.get("reasoning_content"):
            return False
        at = at.parent
    return True


def call_ids(message: Message) -> list[str]:
    return [str(call.get("id")) for call in cast("list[dict[str, Any]]", message.get("tool_calls") or [])]


def _digest(before: bytes, data: bytes) -> bytes:
    return blake2b(data, key=before, digest_size=16).digest()


def _arguments(arguments: Any) -> Any:
    """Normalise a call's arguments: spacing, and 1.0 that a JavaScript client writes as 1."""
    if isinstance(arguments, str):
        try:
            return _plain(json.loads(arguments))
        except (ValueError, RecursionError):
            return arguments
    return _plain(arguments)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    return value


# --- as rows


def turn_row(turn: TurnNode) -> dict[str, Any]:
    thought = turn.thought
    return {
        "id": turn.id,
        "parent": None if turn.parent is None else turn.parent.id,
        "kept": turn.kept,
        "kind": turn.kind,
        "said": turn.said,
        "told": turn.told,
        "context": turn.context.tolist(),
        "ids": turn.ids.tolist(),
        "logprobs": turn.logprobs.tolist(),
        "spans": [[span.version, span.count] for span in turn.spans],
        "finish_reason": turn.finish_reason,
        "thought": None if thought is None else [thought.num_tokens, thought.closed],
        "ends": [[digest.hex(), kept] for digest, kept in turn.ends],
        "text_size": turn.text_size,
        "sampling": list(turn.sampling),
    }


def turn_of(row: Mapping[str, Any], session: Session) -> TurnNode:
    """Read a stored turn; its parent must be in the session."""
    thought, parent = row["thought"], row["parent"]
    return TurnNode(
        row["id"], session, session.turns[parent] if parent else None, row["kept"], row["kind"],
        row["said"], row["told"],
        array("i", row["context"]), array("i", row["ids"]), array("d", row["logprobs"]),
        [Span(version, count) for version, count in row["spans"]], row["finish_reason"],
        None if thought is None else Thought(*thought),
        [(bytes.fromhex(digest), kept) for digest, kept in row["ends"]], row["text_size"],
        sampling=tuple(row.get("sampling", (1.0, 1.0, 0))),
    )  # fmt: skip


def trajectory_row(made: Trajectory) -> dict[str, Any]:
    """Return a trajectory in the rollout service's JSON form."""
    spans: list[list[int]] = []
    for version in made.versions:
        if spans and spans[-1][0] == version:
            spans[-1][1] += 1
        else:
            spans.append([version, 1])
    return {
        "ids": made.ids,
        "logprobs": made.logprobs,
        "trained": [int(trained) for trained in made.trained],
        "spans": spans,
        "reward": made.reward,
        "status": made.status,
        "metrics": made.metrics,
        "thinking_tokens": made.thinking_tokens,
        "unclosed": made.unclosed,
        "task_id": made.task_id,
        "messages": made.messages,
    }
