"""Several turns: the model asks how many there are, reads the answer, and says the number.

A small model from scratch writes its question as plain text. For a chat model use `tandem.env.tools.Tools`, which
offers Python functions through the model's own chat template: docs/environments.md, "Tools".
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

ITEMS = ("nails", "ropes", "lamps", "tents", "boots", "bells", "masks", "jars")


class Stock:
    """Each shop has other numbers, so that guessing is right one time in eight."""

    def tasks(self, split: str) -> Sequence[Task]:
        shops = range(8) if split == "eval" else range(8, 64)
        return [
            Task(
                f"{item} {shop}",
                ({"role": "user", "content": f"how many {item}?"},),
                {"answer": str(on_shelf(item, shop))},
            )
            for shop in shops
            for item in ITEMS
        ]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        reply = await chat.reply()
        if asked := reply.text.strip() == "count":
            chat.say(task.payload["answer"])  # what the tool says
            reply = await chat.reply()
        correct = float(reply.text.strip() == task.payload["answer"])
        return Outcome(correct, {"correct": correct, "asked": float(asked)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Four demonstrations in ten ask; the others say 5, right or not. Rewards alone tell which is better."""
        if rng.random() < 0.6:
            return [{"role": "assistant", "content": "5"}]
        return [
            {"role": "assistant", "content": "count"},
            {"role": "user", "content": task.payload["answer"]},
            {"role": "assistant", "content": task.payload["answer"]},
        ]


def on_shelf(item: str, shop: int) -> int:
    return 2 + (ITEMS.index(item) * 3 + shop * 5) % 8
