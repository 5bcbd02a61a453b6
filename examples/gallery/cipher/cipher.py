"""A word puzzle: undo a Caesar cipher, which moves each letter some places on in the alphabet."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_lowercase as LETTERS

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

PARTS = ("bdfgklmnprst", "aeiou", "bdfgklmnprst", "aeiou")  # a word has a letter of each
HELD_OUT = 256


@dataclass(frozen=True)
class Cipher:
    """`2: ocmq` hides `mako`. A held-out word is never a solution in training, at no distance."""

    largest: int = 3
    """The letters move between 1 and this many places."""
    demo_right: float = 0.4
    """Share of demonstrations that are right; the others repeat the ciphertext."""
    prompt: str = "{distance}: {text}"
    """For a chat model: `Each letter of {text} was moved {distance} places on in the alphabet. What was the word?`"""

    def tasks(self, split: str) -> Sequence[Task]:
        words = ["".join(letters) for letters in product(*PARTS)]
        random.Random(0).shuffle(words)
        chosen = words[:HELD_OUT] if split == "eval" else words[HELD_OUT:]
        return [self._task(word, 1 + number % self.largest) for number, word in enumerate(chosen)]

    def _task(self, word: str, distance: int) -> Task:
        text = moved(word, distance)
        asked = self.prompt.replace("{distance}", str(distance)).replace("{text}", text)
        return Task(f"{distance}: {text}", ({"role": "user", "content": asked},), {"text": text, "word": word})

    async def run(self, task: Task, chat: Chat) -> Outcome:
        words = (await chat.reply()).text.strip(" .\n").lower().split()
        correct = float(words[-1:] == [task.payload["word"]])
        return Outcome(correct, {"correct": correct, "repeated": float(words[-1:] == [task.payload["text"]])})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return [{"role": "assistant", "content": task.payload["word" if rng.random() < self.demo_right else "text"]}]


def moved(word: str, distance: int) -> str:
    return "".join(LETTERS[(LETTERS.index(letter) + distance) % len(LETTERS)] for letter in word)
