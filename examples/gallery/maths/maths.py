"""Equations, made and checked: problems come from a generator, and a solution is put into the equation to check it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

UNKNOWNS = "abknpqtxyz"
HELD_OUT = 256


@dataclass(frozen=True)
class Maths:
    """`k+4=57` is solved by `k=53`. The same numbers are in one split only; no solution is stored."""

    largest_step: int = 9
    """The number beside the unknown lies between 1 and this."""
    carry: bool = False
    """Also equations in which a digit is carried; a small model takes much longer to learn them."""
    demo_right: float = 0.4
    """Share of demonstrations that are right; the others copy the right side."""
    prompt: str = "{equation}"
    """For a chat model: `Solve {equation}. End with the solution.`"""

    def tasks(self, split: str) -> Sequence[Task]:
        rng, steps = random.Random(0), range(1, self.largest_step + 1)
        made = [
            (sign, step, large if sign > 0 else small)
            for sign, step, small in product((1, -1), steps, range(10, 99))
            if (large := small + step) < 100 and (self.carry or small % 10 + step % 10 <= 9)
        ]
        rng.shuffle(made)
        if split == "eval":
            return [self._task(rng.choice(UNKNOWNS), *each) for each in made[:HELD_OUT]]
        return [self._task(unknown, *each) for unknown in UNKNOWNS for each in made[HELD_OUT:]]

    def _task(self, unknown: str, sign: int, step: int, result: int) -> Task:
        equation = f"{unknown}{'+' if sign > 0 else '-'}{step}={result}"
        asked = self.prompt.replace("{equation}", equation)
        return Task(equation, ({"role": "user", "content": asked},), {"shift": sign * step, "result": result})

    async def run(self, task: Task, chat: Chat) -> Outcome:
        found = re.findall(r"(?<![0-9])-?[0-9]{1,9}(?!\.?[0-9])", (await chat.reply()).text)
        holds = bool(found) and int(found[-1]) + task.payload["shift"] == task.payload["result"]
        return Outcome(float(holds), {"correct": float(holds), "a_number": float(bool(found))})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """What a model from scratch imitates first. Rewards alone tell it which way of solving is right."""
        shift = task.payload["shift"] if rng.random() < self.demo_right else 0
        return [{"role": "assistant", "content": f"{task.id[0]}={task.payload['result'] - shift}"}]
