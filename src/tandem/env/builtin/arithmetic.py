"""Built-in environment: compute with two numbers in one turn; the reply's last number is the answer."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.env.builtin.reply_parsing import last_number
from tandem.env.builtin.split import check_params, in_split
from tandem.errors import SpecError
from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

NUM_PROBLEMS = 50_000  # draws for both splits; fewer problems if they repeat
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class Arithmetic:
    """`12+34` is answered by `46`. A held-out pair is not in training in either order."""

    largest: int = 99
    """Both numbers lie between 0 and this."""
    operation: Literal["+", "-", "*"] = "+"
    """The operation on both numbers."""
    demo_right: float = 0.5
    """Share of demonstrations that are right; the others miss by one or by ten."""
    prompt: str = "{problem}"
    """The prompt; for a chat model use `What is {problem}?`."""

    def __post_init__(self) -> None:
        check_params(self, largest=(9, 10**9), demo_right=(0, 1))
        if "{problem}" not in self.prompt:
            raise SpecError(f"environment.params.prompt = '{self.prompt}': it must contain {{problem}}")

    def tasks(self, split: str) -> Sequence[Task]:
        rng = random.Random("arithmetic")
        draws = (int(rng.random() * (self.largest + 1)) for _ in range(2 * NUM_PROBLEMS))
        pairs = dict.fromkeys(zip(draws, draws, strict=True))  # without repeats, in the order drawn
        return [self._task(a, b) for a, b in pairs if in_split(split, f"{min(a, b)},{max(a, b)}")]

    def _task(self, a: int, b: int) -> Task:
        problem, answer = f"{a}{self.operation}{b}", OPERATIONS[self.operation](a, b)
        asked = self.prompt.replace("{problem}", problem)
        return Task(id=problem, messages=({"role": "user", "content": asked},), payload={"answer": answer})

    async def run(self, task: Task, chat: Chat) -> Outcome:
        reply = await chat.reply()
        correct = float(last_number(reply.text) == task.payload["answer"])
        return Outcome(correct, {"correct": correct})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        miss = 0 if rng.random() < self.demo_right else rng.choice((-10, -1, 1, 10))
        return [{"role": "assistant", "content": str(task.payload["answer"] + miss)}]
