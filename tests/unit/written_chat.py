"""A Chat whose replies are written down, for tests of environments; it keeps what the environment said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.types import Message, ToolCall


@dataclass(frozen=True)
class Said:
    text: str
    truncated: bool = False
    tool_calls: Sequence[ToolCall] = ()


@dataclass
class WrittenChat:
    """`turns`: texts in their order, or a function of what was said last."""

    turns: Sequence[str] | Callable[[str], str]
    heard: list[Message] = field(default_factory=list)
    offered: list[Any] = field(default_factory=list)
    replies: int = 0

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.offered = list(tools)

    def say(self, *messages: Message | str) -> None:
        self.heard += [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Said:
        last = self.heard[-1]["content"] if self.heard else ""
        text = self.turns(last) if callable(self.turns) else self.turns[self.replies]
        self.replies += 1
        return Said(text)

    async def judge(self, messages: Sequence[Message], *, max_tokens: int = 512) -> str:
        raise NotImplementedError
