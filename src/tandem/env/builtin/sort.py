"""Built-in environment: sort the letters of a word in one turn; the reply's last word is the answer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tandem.env.builtin.reply_parsing import last_word
from tandem.env.builtin.split import check_params, in_split
from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

NUM_WORDS = 50_000  # for both splits; fewer if short words repeat


@dataclass(frozen=True)
class Sort:
    """`sort waltz` is answered by `altwz`. No held-out word is an anagram of a training one."""

    letters: int = 5
    """Length of a word."""
    demo_right: float = 0.35
    """Share of demonstrations that are sorted; the others copy the word unchanged."""
    exact: bool = False
    """Whether the whole reply must be the answer; otherwise its last word is enough."""

    def __post_init__(self) -> None:
        check_params(self, letters=(2, 32), demo_right=(0, 1))

    def tasks(self, split: str) -> Sequence[Task]:
        # Split by the sorted letters, so that anagrams are in one split.
        return [self._task(word, answer) for word, answer in _answers(self.letters).items() if in_split(split, answer)]

    def _task(self, word: str, answer: str) -> Task:
        opening = {"role": "user", "content": f"sort {word}"}
        return Task(id=word, messages=(opening,), payload={"word": word, "answer": answer})

    async def run(self, task: Task, chat: Chat) -> Outcome:
        text = (await chat.reply()).text
        said = text.strip() if self.exact else last_word(text, self.letters)
        correct = float(said == task.payload["answer"])
        return Outcome(correct, {"correct": correct})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        shown = task.payload["answer"] if rng.random() < self.demo_right else task.payload["word"]
        return [{"role": "assistant", "content": shown}]


@cache
def _answers(letters: int) -> Mapping[str, str]:
    """Return answers by word. Cached, because a run asks for its tasks three times."""
    rng = random.Random("sort")
    words = ("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=letters)) for _ in range(NUM_WORDS))
    return {word: "".join(sorted(word)) for word in words}
