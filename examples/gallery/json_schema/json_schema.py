"""JSON by schema: the reply must be JSON, fit the schema, and hold what the text says."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

SYLLABLES = ("bdfklmnprst", "aeiou", "bdfklmnprst", "aeiou")  # of names
TYPES: Mapping[str, type] = {"string": str, "integer": int, "boolean": bool}
FIELDS = {"name": "string", "age": "integer", "paid": "boolean"}
HELD_OUT = 256


@dataclass(frozen=True)
class JsonSchema:
    """`name string, age integer: mako 34` is answered by `{"name": "mako", "age": 34}`."""

    demo_right: float = 0.4
    """Share of demonstrations that fit the schema; the others write every value as a string."""

    def tasks(self, split: str) -> Sequence[Task]:
        rng, tasks = random.Random(0), dict[str, Task]()
        while len(tasks) < 6_000:
            wanted: dict[str, Any] = {"name": "".join(rng.choice(part) for part in SYLLABLES)}
            wanted |= {"age": rng.randint(10, 99)} if rng.random() < 0.5 else {"paid": rng.random() < 0.5}
            fields = ", ".join(f"{key} {FIELDS[key]}" for key in wanted)
            said = " ".join(str(value).lower() for value in wanted.values())
            task = Task(f"{fields}: {said}", ({"role": "user", "content": f"{fields}: {said}"},), {"wanted": wanted})
            tasks[task.id] = task
        made = list(tasks.values())
        return made[:HELD_OUT] if split == "eval" else made[HELD_OUT:]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        wanted = task.payload["wanted"]
        found = read((await chat.reply()).text)
        fits = found is not None and fits_schema(found, schema_of(wanted))
        correct = float(fits and found == wanted)
        return Outcome(correct, {"correct": correct, "is_json": float(found is not None), "fits": float(fits)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        wanted = task.payload["wanted"]
        if rng.random() >= self.demo_right:
            wanted = {key: str(value).lower() for key, value in wanted.items()}
        return [{"role": "assistant", "content": json.dumps(wanted)}]


def schema_of(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an answer, as `response_format` of an OpenAI-compatible server takes it."""
    properties = {key: {"type": FIELDS[key]} for key in wanted}
    return {"type": "object", "properties": properties, "required": list(wanted), "additionalProperties": False}


def read(text: str) -> object:
    """The value that a text is in JSON; None if it is none, or is too large or too deep to be an answer."""
    try:
        return json.loads(text) if len(text) <= 1_000 else None
    except (ValueError, RecursionError):
        return None


def fits_schema(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether a value fits: this environment's schemas have an object of plain fields, and no more."""
    if not isinstance(value, dict) or set(value) != set(schema["required"]):
        return False
    return all(type(value[key]) is TYPES[field["type"]] for key, field in schema["properties"].items())
