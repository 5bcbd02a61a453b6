"""Tool use: the model calls a Python function, reads what it returns, and answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.env.tools import Tools
from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

ITEMS = ("nails", "ropes", "lamps", "tents", "boots", "bells", "masks", "drums")
SHOPS = range(100, 1000)
HELD_OUT = 256


def stock(item: str, shop: int) -> int:
    """How many are left."""
    if item not in ITEMS or shop not in SHOPS:
        raise ValueError(f"no {item[:20]} in shop {shop}")
    return random.Random(f"stock {item} {shop}").randint(10, 99)


@dataclass(frozen=True)
class ToolUse:
    """`ropes in 375` asks how many; only the tool `stock` knows. Held out: pairs of item and shop."""

    demo_right: float = 0.4
    """Share of demonstrations that call the tool; the others answer with a guess."""
    prompt: str = "{item} in {shop}"
    """For a chat model: `How many {item} are left in shop {shop}? Answer with the number.`"""

    def tasks(self, split: str) -> Sequence[Task]:
        pairs = [(item, shop) for item in ITEMS for shop in SHOPS]
        random.Random(0).shuffle(pairs)
        return [self._task(*each) for each in (pairs[:HELD_OUT] if split == "eval" else pairs[HELD_OUT:])]

    def _task(self, item: str, shop: int) -> Task:
        asked = self.prompt.replace("{item}", item).replace("{shop}", str(shop))
        payload = {"item": item, "shop": shop}
        return Task(f"{item} in {shop}", ({"role": "user", "content": asked},), payload)

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
        if rng.random() >= self.demo_right:
            return [{"role": "assistant", "content": str(rng.randint(10, 99))}]
        number = str(stock(**task.payload))
        call = {"type": "function", "function": {"name": "stock", "arguments": task.payload}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "stock", "content": number},
            {"role": "assistant", "content": number},
        ]
