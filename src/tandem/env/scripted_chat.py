"""A Chat whose replies were written beforehand: play an environment's demonstration without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tandem.errors import EpisodeFailed
from tandem.io.tool_calls import parse_calls
from tandem.types import Message, ToolCall


@dataclass(frozen=True)
class ScriptedReply:
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


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = cast("Mapping[str, Any]", call.get("function", call))
    return ToolCall(str(function["name"]), cast("Mapping[str, Any]", function["arguments"]))
