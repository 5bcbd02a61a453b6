"""Unit conversion: lengths and masses, in exact decimals; the answer may be written in any way that is equal."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

SIZES = {  # in the smallest unit of its kind
    "length": {"mm": 1, "cm": 10, "m": 1_000, "km": 1_000_000},
    "mass": {"mg": 1, "g": 1_000, "kg": 1_000_000},
}
MOST_SHIFT = 1_000
HELD_OUT = 256


@dataclass(frozen=True)
class Units:
    """`37 cm in mm` is answered by `370`. Held out: numbers with their units."""

    demo_right: float = 0.4
    """Share of demonstrations that are right; the others repeat the number."""
    prompt: str = "{amount} {given} in {wanted}"
    """For a chat model: `How many {wanted} are {amount} {given}? Answer with the number.`"""

    def tasks(self, split: str) -> Sequence[Task]:
        asked = [
            (amount, given, wanted, large // small)
            for sizes in SIZES.values()
            for given, large in sizes.items()
            for wanted, small in sizes.items()
            if small < large <= small * MOST_SHIFT
            for amount in range(11, 1000)
            if amount % 10
        ]
        random.Random(0).shuffle(asked)
        return [self._task(*each) for each in (asked[:HELD_OUT] if split == "eval" else asked[HELD_OUT:])]

    def _task(self, amount: int, given: str, wanted: str, factor: int) -> Task:
        asked = self.prompt.format(amount=amount, given=given, wanted=wanted)
        payload = {"amount": amount, "answer": amount * factor}
        return Task(f"{amount} {given} in {wanted}", ({"role": "user", "content": asked},), payload)

    async def run(self, task: Task, chat: Chat) -> Outcome:
        found = number_in((await chat.reply()).text)
        correct = float(found == task.payload["answer"])
        return Outcome(correct, {"correct": correct, "a_number": float(found is not None)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        shown = "answer" if rng.random() < self.demo_right else "amount"
        return [{"role": "assistant", "content": str(task.payload[shown])}]


def number_in(text: str) -> Decimal | None:
    """The last number of a text, with thousands apart or not; None if there is none."""
    found = re.findall(r"(?<![\w.])-?[0-9][0-9,]{0,20}(?:\.[0-9]{1,20})?", text[:2_000])
    return Decimal(found[-1].replace(",", "")) if found else None
