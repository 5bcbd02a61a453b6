"""A game for two: nim against a second policy. Take one, two or three; who takes the last one wins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

MOST = 3
HELD_OUT = 256


@dataclass(frozen=True)
class Nim:
    """`13 left` opens; the model answers `1`. It can always win: no heap is a multiple of four when it begins."""

    opponent: Literal["perfect", "random", "judge"] = "perfect"
    """perfect: leaves a multiple of four if it can. random: draws its moves from the task's seed. judge: the model of
    [environment.judge], which may be the policy itself, or in `tandem env try` a second person at the keyboard."""
    largest: int = 15
    """Heaps have between 5 and this many."""
    demo_right: float = 0.4
    """Share of demonstrated moves that are perfect; the others take one."""

    def tasks(self, split: str) -> Sequence[Task]:
        games = [(heap, seed) for heap in range(5, self.largest + 1) if heap % 4 for seed in range(800)]
        random.Random(0).shuffle(games)
        return [
            Task(f"{heap}, {seed}", ({"role": "user", "content": f"{heap} left"},), {"heap": heap, "seed": seed})
            for heap, seed in (games[:HELD_OUT] if split == "eval" else games[HELD_OUT:])
        ]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        left, rng = task.payload["heap"], random.Random(task.id)
        while True:
            taken = move_in((await chat.reply()).text, left)
            if taken is None:
                return Outcome(0.0, {"correct": 0.0, "illegal": 1.0})
            left -= taken
            if not left:
                return Outcome(1.0, {"correct": 1.0, "illegal": 0.0})
            answered = await self._answer(left, rng, chat)
            if answered is None:  # a judge's illegal move loses, as the model's does
                return Outcome(1.0, {"correct": 1.0, "illegal": 0.0})
            left -= answered
            if not left:
                return Outcome(0.0, {"correct": 0.0, "illegal": 0.0})
            chat.say(f"{left} left")

    async def _answer(self, left: int, rng: random.Random, chat: Chat) -> int | None:
        """The opponent's move; None if it is not allowed."""
        if self.opponent == "judge":
            rules = f"Nim: {left} left. Take 1, 2 or 3; who takes the last one wins. Answer with a digit."
            return move_in(await chat.judge([{"role": "user", "content": rules}], max_tokens=8), left)
        return self._scripted(left, rng)

    def _scripted(self, left: int, rng: random.Random) -> int:
        drawn = rng.randint(1, min(MOST, left))
        return perfect(left) or drawn if self.opponent == "perfect" else drawn

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A whole game, won or lost, against the opponent that the task will have."""
        left, opponent, messages = task.payload["heap"], random.Random(task.id), list[Message]()
        while True:
            taken = perfect(left) or 1 if rng.random() < self.demo_right else 1
            left -= taken
            messages.append({"role": "assistant", "content": str(taken)})
            left -= self._scripted(left, opponent) if left else 0
            if not left:
                return messages
            messages.append({"role": "user", "content": f"{left} left"})


def perfect(left: int) -> int:
    """The move that leaves a multiple of four; 0 if none does."""
    return left % (MOST + 1)


def move_in(text: str, left: int) -> int | None:
    said = text.strip()
    return int(said) if said in ("1", "2", "3") and int(said) <= left else None
