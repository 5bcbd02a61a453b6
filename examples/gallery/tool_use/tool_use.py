"""Tool use: the model calls a Python function, reads what it returns, and answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tandem.env.tools import Tools
from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

ITEMS = ["".join(letters) for letters in product("bdfgklmnprstvz", "aeiou", "bdfgklmnprstvz")]
HELD_OUT = 256


def stock(item: str) -> int:
    """Items left."""
    if item not in ITEMS:
        raise ValueError(f"there is no {item[:20]}")
    return random.Random(f"stock {item}").randint(10, 99)


@dataclass(frozen=True)
class ToolUse:
    """`stock of tam` asks how many are left; only the tool `stock` knows. A held-out item is in no training task."""

    demo_right: float = 0.4
    """Share of demonstrations that answer what the tool returned; the others call it, and say 0 all the same."""
    prompt: str = "stock of {item}"
    """For a chat model: `How many of the item {item} are left? Answer with the number.`"""

    def tasks(self, split: str) -> Sequence[Task]:
        items = random.Random(0).sample(ITEMS, len(ITEMS))
        chosen = items[:HELD_OUT] if split == "eval" else items[HELD_OUT:]
        return [
            Task(item, ({"role": "user", "content": self.prompt.replace("{item}", item)},), {"item": item})
            for item in chosen
        ]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        tools = Tools(stock, timeout_s=5)
        chat.offer(tools.schemas)
        reply = await chat.reply()
        if called := bool(reply.tool_calls):
            chat.say(*await tools.answer(reply.tool_calls))
            reply = await chat.reply()
        correct = float(reply.text.strip() == str(stock(**task.payload)))
        return Outcome(correct, {"correct": correct, "called": float(called)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        number = str(stock(**task.payload))
        call = {"type": "function", "function": {"name": "stock", "arguments": task.payload}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "stock", "content": number},
            {"role": "assistant", "content": number if rng.random() < self.demo_right else "0"},
        ]
