"""Built-in environment: guess a number in several turns, with "higher" or "lower" after each wrong guess."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.env.builtin.reply_parsing import last_number
from tandem.env.builtin.split import check_params, in_split
from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task


@dataclass(frozen=True)
class Guess:
    """`guess 10-41` hides a number of that range; a reply's last number is a guess. Held out: (range, number) pairs."""

    numbers: int = 32
    """Size of a range; every range lies between 0 and 99."""
    turns: int = 6
    """Guesses allowed; 6 find one of 63 numbers when each halves what is left."""
    demo_right: float = 0.5
    """Share of demonstrated guesses that halve what is left; the others fall anywhere in it."""

    def __post_init__(self) -> None:
        check_params(self, numbers=(2, 96), turns=(1, 100), demo_right=(0, 1))

    def tasks(self, split: str) -> Sequence[Task]:
        games = [(low, secret) for low in range(101 - self.numbers) for secret in range(low, low + self.numbers)]
        random.Random("guess").shuffle(games)  # so that any prefix covers all ranges
        return [self._task(*game) for game in games if in_split(split, str(game))]

    def _task(self, low: int, secret: int) -> Task:
        opening = {"role": "user", "content": f"guess {low}-{low + self.numbers - 1}"}
        return Task(f"{low},{secret}", (opening,), {"low": low, "secret": secret})

    async def run(self, task: Task, chat: Chat) -> Outcome:
        for turn in range(1, self.turns + 1):
            guess = last_number((await chat.reply()).text)
            if guess is None or guess not in range(100):
                break  # not a guess: the game is lost
            if guess == task.payload["secret"]:
                return Outcome(1.0, {"correct": 1.0, "turns": turn})
            if turn < self.turns:  # the last guess gets no answer
                chat.say("higher" if guess < task.payload["secret"] else "lower")
        return Outcome(0.0, {"correct": 0.0, "turns": self.turns})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        low, secret, messages = task.payload["low"], task.payload["secret"], list[Message]()
        high = low + self.numbers - 1
        for _ in range(self.turns):
            number = (low + high) // 2 if rng.random() < self.demo_right else rng.randint(low, high)
            messages.append({"role": "assistant", "content": str(number)})
            if number == secret:
                return messages
            low, high = (number + 1, high) if number < secret else (low, number - 1)
            messages.append({"role": "user", "content": "higher" if number < secret else "lower"})
        return messages[:-1]
