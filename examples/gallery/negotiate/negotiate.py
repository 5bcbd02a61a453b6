"""A negotiation of several turns: the model buys, and a seller with a hidden lowest price answers."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

ROUNDS = 4
GIVES = 0.4  # share of the way to the lowest price that the seller goes in each round
HELD_OUT = 256


@dataclass(frozen=True)
class Negotiate:
    """The seller asks `80`; the model answers with a price, or `deal`. A price at or above what he would ask next is a
    deal. The reward is the saved share of what could be saved at most; no deal within four rounds earns nothing."""

    demo_patient: float = 0.2
    """Share of demonstrated answers that hold out for less; the others take what is asked."""

    def tasks(self, split: str) -> Sequence[Task]:
        cases = [(asked, lowest) for asked in range(50, 100) for lowest in range(asked // 2, asked - 9)]
        random.Random(0).shuffle(cases)
        return [
            Task(f"{asked}, {low}", ({"role": "user", "content": f"{asked}"},), {"asked": asked, "lowest": low})
            for asked, low in (cases[:HELD_OUT] if split == "eval" else cases[HELD_OUT:])
        ]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        first, lowest = task.payload["asked"], task.payload["lowest"]
        asked = first
        for turn in range(1, ROUNDS + 1):
            price = price_in((await chat.reply()).text, asked)
            if price is None:
                break  # neither a price nor a deal: the seller leaves
            following = next_price(asked, lowest)
            if price >= following:
                paid = min(price, asked)
                saved = (first - paid) / (first - lowest)
                return Outcome(saved, {"deal": 1.0, "turns": float(turn), "paid": float(paid)})
            asked = following
            if turn < ROUNDS:
                chat.say(str(asked))
        return Outcome(0.0, {"deal": 0.0, "turns": float(ROUNDS), "paid": 0.0})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        asked, messages = task.payload["asked"], list[Message]()
        for _ in range(ROUNDS - 1):
            if rng.random() >= self.demo_patient:
                break
            following = next_price(asked, task.payload["lowest"])
            messages.append({"role": "assistant", "content": "10"})
            messages.append({"role": "user", "content": str(following)})
            asked = following
        return [*messages, {"role": "assistant", "content": "deal"}]


def next_price(asked: int, lowest: int) -> int:
    """What the seller asks after a refused offer."""
    return asked - round((asked - lowest) * GIVES)


def price_in(text: str, asked: int) -> int | None:
    """What an answer offers: `deal` is the price asked, otherwise its last number; None if it has neither."""
    if text.strip().lower() == "deal":
        return asked
    found = re.findall(r"(?<![0-9.-])[0-9]{1,6}(?!\.?[0-9])", text[:1_000])
    return int(found[-1]) if found else None
