"""An environment of your own, whole: two methods and no base class. `tandem env try examples/shout.py` plays it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task


class Shout:
    """The model is shown a word and should say it in capitals."""

    def tasks(self, split: str) -> Sequence[Task]:
        rng = random.Random(split)
        words = {"".join(rng.choices("abcdefgh", k=4)) for _ in range(512)}
        words = {word for word in words if (word < "b") == (split == "eval")}  # words with a first `a` are held out
        return [Task(word, ({"role": "user", "content": word},), {"answer": word.upper()}) for word in sorted(words)]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        reply = await chat.reply()
        correct = float(reply.text.strip() == task.payload["answer"])
        return Outcome(correct, {"correct": correct})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Optional: what a model from scratch imitates before RL. Six in ten only repeat the word."""
        right = rng.random() < 0.4
        return [{"role": "assistant", "content": task.payload["answer"] if right else task.id}]
