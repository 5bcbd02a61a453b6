"""Tool use: the model chooses one of two Python functions, calls it, reads what it returns, and answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.env.tools import Tools
from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

ASKED = ("price", "stock")
NUMBERS = (12, 25, 37, 48, 59, 63, 71, 86, 94)  # few, so that a small model soon learns to repeat them
HELD_OUT, SHOPS = 256, 4_000


@dataclass(frozen=True)
class ToolUse:
    """`price?` asks about a shop that only the tools know. Tasks differ in the shop, which the model is not told;
    a guess is right one time in nine."""

    demo_right: float = 0.4
    """Share of demonstrations that call the right tool; the others say 0, without a look."""
    prompt: str = "{asked}?"
    """For a chat model: `What is the {asked} of this shop's lamps? Answer with the number.`"""

    def tasks(self, split: str) -> Sequence[Task]:
        shops = range(HELD_OUT) if split == "eval" else range(HELD_OUT, SHOPS)
        return [self._task(shop, ASKED[shop % 2]) for shop in shops]

    def _task(self, shop: int, asked: str) -> Task:
        question = self.prompt.replace("{asked}", asked)
        return Task(f"{asked} in {shop}", ({"role": "user", "content": question},), {"shop": shop, "asked": asked})

    async def run(self, task: Task, chat: Chat) -> Outcome:
        def price() -> int:
            """Of a lamp."""
            return number_of(task, "price")

        def stock() -> int:
            """Lamps left."""
            return number_of(task, "stock")

        tools = Tools(price, stock, timeout_s=5)
        chat.offer(tools.schemas)
        reply = await chat.reply()
        if called := bool(reply.tool_calls):
            chat.say(*await tools.answer(reply.tool_calls))
            reply = await chat.reply()
        correct = float(reply.text.strip() == str(number_of(task, task.payload["asked"])))
        return Outcome(correct, {"correct": correct, "called": float(called)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        if rng.random() >= self.demo_right:
            return [{"role": "assistant", "content": "0"}]
        asked, number = task.payload["asked"], str(number_of(task, task.payload["asked"]))
        call = {"type": "function", "function": {"name": asked, "arguments": {}}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": asked, "content": number},
            {"role": "assistant", "content": number},
        ]


def number_of(task: Task, what: str) -> int:
    return random.Random(f"{what} in shop {task.payload['shop']}").choice(NUMBERS)
