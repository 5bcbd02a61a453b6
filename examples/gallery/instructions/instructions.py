"""Instruction following: each instruction of a request has a check of its own, and all must hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

TIMES = {"one": 1, "two": 2}
MARKS = {"dot": ".", "ask": "?", "nil": ""}
CASES = {"caps": True, "tiny": False}
HELD_OUT = 32  # words; each is asked for in all ways


@dataclass(frozen=True)
class Instructions:
    """`two, dot, caps: mak` is answered by `MAK MAK.`"""

    demo_right: float = 0.4
    """Share of demonstrations that follow every instruction; the others forget the last one."""
    prompt: str = "{request}"
    """For a chat model: say what the words mean, and `Write as asked, and nothing else. {request}`"""

    def tasks(self, split: str) -> Sequence[Task]:
        rng = random.Random(0)
        words = ["".join(letters) for letters in product("bdfklmnprstvz", "aeiou", "bdfklmnprstvz")]
        rng.shuffle(words)
        chosen = words[:HELD_OUT] if split == "eval" else words[HELD_OUT:]
        asked = list(product(chosen, TIMES, MARKS, CASES))
        rng.shuffle(asked)
        return [self._task(*each) for each in asked]

    def _task(self, word: str, times: str, mark: str, case: str) -> Task:
        request = f"{times}, {mark}, {case}: {word}"
        payload = {"word": word, "times": TIMES[times], "mark": MARKS[mark], "capitals": CASES[case]}
        asked = self.prompt.replace("{request}", request)
        return Task(request, ({"role": "user", "content": asked},), payload)

    async def run(self, task: Task, chat: Chat) -> Outcome:
        text = (await chat.reply()).text.strip()
        held = [check(text) for check in checks(**task.payload)]
        correct = float(all(held))
        return Outcome(correct, {"correct": correct, "followed": sum(held) / len(held)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        asked = dict(task.payload)
        if rng.random() >= self.demo_right:  # forgets what the request ends with
            last = "capitals" if asked["capitals"] else "mark" if asked["mark"] else "times"
            asked[last] = {"capitals": False, "mark": "", "times": 1}[last]
        said = " ".join([asked["word"]] * asked["times"]) + asked["mark"]
        return [{"role": "assistant", "content": said.upper() if asked["capitals"] else said}]


def checks(word: str, times: int, mark: str, capitals: bool) -> list[Callable[[str], bool]]:
    """One for each instruction; none looks at what another one asks for."""
    return [
        lambda text: text.strip(".?").lower().split() == [word] * times,
        lambda text: text[-1:] == mark if mark else text[-1:].isalpha(),
        lambda text: text == text.upper() if capitals else text == text.lower(),
    ]
