"""Search over a small corpus: the model writes a query, reads the best passage, and answers or searches again."""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

CITIES = ("bern", "cork", "graz", "kiev", "lima", "nice", "oslo", "rome", "york", "bath")
FACTS = {"born": "was born in", "home": "has a home in", "work": "does all work in", "shop": "has a shop in"}
HELD_OUT = 256


def make_corpus() -> dict[tuple[str, str], tuple[str, str]]:
    """For each of 845 people and each fact a passage, and the city that it names."""
    rng, people = random.Random("corpus"), product("bdfklmnprstvz", "aeiou", "bdfklmnprstvz")
    corpus = dict[tuple[str, str], tuple[str, str]]()
    for person, fact in product(("".join(letters) for letters in people), FACTS):
        city = rng.choice(CITIES)
        corpus[person, fact] = f"{person} {FACTS[fact]} {city}", city
    return corpus


CORPUS = make_corpus()
PASSAGES = [passage for passage, _ in CORPUS.values()]
WITH_WORD = defaultdict[str, list[int]](list)
for number, passage in enumerate(PASSAGES):
    for word in set(passage.split()):
        WITH_WORD[word].append(number)


def best_passage(query: str) -> str:
    """The passage that shares the rarest words with the query; the first of equals."""
    scores = defaultdict[int, float](float)
    for asked in set(re.findall(r"[a-z]+", query[:200].lower())) & WITH_WORD.keys():
        for number in WITH_WORD[asked]:
            scores[number] += math.log(len(PASSAGES) / len(WITH_WORD[asked]))
    return PASSAGES[max(scores, key=lambda number: (scores[number], -number))] if scores else "nothing found"


@dataclass(frozen=True)
class Search:
    """`where born tam` is answered after `find tam born`. Held out: pairs of person and fact."""

    demo_right: float = 0.4
    """Share of demonstrations that search for person and fact; the others search for the person alone."""
    most_searches: int = 2
    """After so many, what the model says is its answer."""

    def tasks(self, split: str) -> Sequence[Task]:
        asked = list(CORPUS)
        random.Random(0).shuffle(asked)
        return [
            Task(
                f"{person} {fact}",
                ({"role": "user", "content": f"where {fact} {person}"},),
                {"person": person, "fact": fact, "answer": CORPUS[person, fact][1]},
            )
            for person, fact in (asked[:HELD_OUT] if split == "eval" else asked[HELD_OUT:])
        ]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        said, searches = (await chat.reply()).text.strip(), 0
        while said.startswith("find ") and searches < self.most_searches:
            searches += 1
            chat.say(best_passage(said.removeprefix("find ")))
            said = (await chat.reply()).text.strip()
        correct = float(said == task.payload["answer"])
        return Outcome(correct, {"correct": correct, "searches": float(searches)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        person, fact = task.payload["person"], task.payload["fact"]
        query = f"{person} {fact}" if rng.random() < self.demo_right else person
        passage = best_passage(query)
        return [
            {"role": "assistant", "content": f"find {query}"},
            {"role": "user", "content": passage},
            {"role": "assistant", "content": passage.split()[-1]},
        ]
