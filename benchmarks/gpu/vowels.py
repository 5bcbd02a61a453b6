"""An environment for measuring steps: answers are long, and no two are worth the same for long."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

from tandem.protocols import Chat
from tandem.types import Outcome, Task

_RANDOM = random.Random()  # the global one is the run's


@dataclass(frozen=True)
class Vowels:
    """The share of vowels in the answer."""

    num_tasks: int = 4096
    pause_s: float = 0.0
    """The most that an answer waits before it begins, so that an engine gets requests all the time."""
    until: str = ""
    """No answer waits once this file exists."""

    def tasks(self, split: str) -> list[Task]:
        start = 0 if split == "train" else self.num_tasks
        count = self.num_tasks if split == "train" else 64
        return [self._task(number) for number in range(start, start + count)]

    def _task(self, number: int) -> Task:
        return Task(f"{number}", ({"role": "user", "content": f"Sing, number {number}: " + "la " * 30},))

    async def run(self, task: Task, chat: Chat) -> Outcome:
        if self.pause_s and not Path(self.until).exists():
            await asyncio.sleep(_RANDOM.uniform(0.0, self.pause_s))
        text = (await chat.reply()).text
        return Outcome(sum(letter in "aeiou" for letter in text) / max(1, len(text)))
