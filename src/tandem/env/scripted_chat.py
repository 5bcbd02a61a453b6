"""Chats without a model: play an environment's demonstration, or find out which tools it offers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tandem.errors import EpisodeFailed
from tandem.io.tool_calls import parse_calls
from tandem.protocols import Environment
from tandem.types import Message, Task, ToolCall

_MOST_TURNS = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScriptedReply:
    """A reply that no model sampled."""

    text: str
    truncated: bool = False
    tool_calls: Sequence[ToolCall] = ()


class ScriptedChat:
    """Give the assistant's turns of a conversation as replies, and compare what the environment says in between.

    `differs` is where the episode left the script, in words; empty while it follows it.
    """

    def __init__(self, turns: Sequence[Message]) -> None:
        self._turns = list(turns)
        self._offers = False
        self.differs = ""

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._offers = True

    def say(self, *messages: Message | str) -> None:
        for message in messages:
            said: Message = {"role": "user", "content": message} if isinstance(message, str) else message
            shown = self._turns.pop(0) if self._turns and self._turns[0]["role"] != "assistant" else None
            if shown is None:
                self._left(f"the environment says {said['content']!r:.80} where the demonstration has no such message")
            elif (shown["role"], shown["content"]) != (said["role"], said["content"]):
                self._left(f"the environment says {said['content']!r:.80}, the demonstration {shown['content']!r:.80}")

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> ScriptedReply:
        if not self._turns:
            raise EpisodeFailed("raised", "the environment asks for another reply after the demonstration's last one")
        turn = self._turns.pop(0)
        if turn["role"] != "assistant":
            self._left(f"the environment does not say {turn['content']!r:.80}, as the demonstration does")
            return await self.reply(max_tokens=max_tokens, stop=stop)
        text, calls = parse_calls(str(turn.get("content") or "")) if self._offers else (str(turn["content"] or ""), [])
        return ScriptedReply(text, tool_calls=[*calls, *map(_call, cast("list[Any]", turn.get("tool_calls") or []))])

    async def judge(self, messages: Sequence[Message], *, max_tokens: int = 512) -> str:
        raise EpisodeFailed("judge", "a demonstration is checked without a judge")

    def end(self) -> None:
        """Note that the episode is over."""
        if self._turns:
            self._left(f"the episode ended before the demonstration's {self._turns[0]['content']!r:.80}")

    def _left(self, where: str) -> None:
        self.differs = self.differs or where


class _MuteChat:
    """Answer nothing, and remember the tools."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []
        self._turns = 0

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.tools = [dict(tool) for tool in tools]

    def say(self, *messages: Message | str) -> None: ...

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> ScriptedReply:
        self._turns += 1
        if self._turns > _MOST_TURNS:
            raise EpisodeFailed("raised", f"the environment goes on after {_MOST_TURNS} empty replies")
        return ScriptedReply("")

    async def judge(self, messages: Sequence[Message], *, max_tokens: int = 512) -> str:
        return ""


async def offered_tools(environment: Environment, task: Task, limit_s: float) -> list[dict[str, Any]]:
    """Return the tools that a task offers, as JSON schemas. They are offered before the first reply, so an episode is
    played with empty replies, however it ends."""
    chat = _MuteChat()
    try:
        async with asyncio.timeout(limit_s):
            await environment.run(task, chat)
    except Exception as error:  # noqa: BLE001 - environment code: what it makes of an empty reply does not matter here
        _log.debug("task %s ended after empty replies: %s", task.id, error)
    return chat.tools


def calls_tools(messages: Sequence[Message]) -> bool:
    """Return whether a demonstration calls a tool, or has a tool's answer."""
    return any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = cast("Mapping[str, Any]", call.get("function", call))
    return ToolCall(str(function["name"]), cast("Mapping[str, Any]", function["arguments"]))
