"""What a task's answer is compared with, as far as the task says it. For words about rewards, never for scoring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.types import Task

_NAMES = ("answer", "expected", "target", "solution", "ground_truth", "gold", "label", "result", "output")
_MOST_CHARS, _MOST_COLUMNS = 200, 16


@dataclass(frozen=True, slots=True)
class Expected:
    """The data behind a task by column, and the columns that the scorer reads."""

    columns: Mapping[str, Any]
    read: tuple[str, ...] = ()
    """Empty: the scorer does not say which."""

    def texts(self) -> dict[str, str]:
        """Return the plain columns as texts."""
        plain = ((name, value) for name, value in self.columns.items() if isinstance(value, str | int | float))
        texts = {str(name): str(value).strip()[:_MOST_CHARS] for name, value in plain}
        return {name: texts[name].encode("utf-8", "replace").decode() for name in [*texts][:_MOST_COLUMNS]}

    def answers(self) -> dict[str, str]:
        """Return the columns that an answer is probably compared with."""
        texts = self.texts()
        chosen = [name for name in self.read if name in texts] or [name for name in _NAMES if name in texts]
        return {name: texts[name] for name in chosen}

    def told(self) -> dict[str, Any]:
        """Return it as JSON, for another process."""
        return {"columns": self.texts(), "read": [*self.read]}


def expected_of(task: Task) -> Expected:
    """Return what a task's payload holds: an `Expected`, or the entries that are named like an answer, or else all."""
    for value in task.payload.values():
        if isinstance(value, Expected):
            return value
        if isinstance(value, Task):  # a part of a mix
            return expected_of(value)
    named = {name: task.payload[name] for name in _NAMES if name in task.payload} or task.payload
    return Expected(named, tuple(named))
