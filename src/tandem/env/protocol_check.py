"""Check before a run that a loaded environment follows the protocol; later each mistake would cost a group."""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from tandem.errors import EnvironmentFailed, SpecError, TandemError
from tandem.protocols import Environment, Reporting
from tandem.types import Task

MAX_CHECKED = 100_000  # tasks checked per split; a split may be far longer, and generated lazily


def check_environment(environment: Environment, name: str) -> None:
    """Check that its methods can be called, both splits have tasks, and task ids are unique over both."""
    _check_methods(environment, name)
    split_of: dict[str, str] = {}
    for split in ("train", "eval"):
        for task in _first_tasks(environment, name, split):
            if task.id in split_of:
                where = f"twice in '{split}'" if split_of[task.id] == split else "in 'train' and in 'eval'"
                raise wrong(name, f"task id '{task.id}' is {where}; give every task a unique id")
            split_of[task.id] = split


def report_of(environment: Environment) -> str:
    """Return what the environment says of its data; empty if it says nothing, or means something else by the name."""
    report = cast("object", environment.report) if isinstance(environment, Reporting) else ""
    return report if isinstance(report, str) else ""


def wrong(name: str, text: str) -> SpecError:
    return SpecError(f"environment.name = '{name}': {text}")


@contextmanager
def their_code(name: str, doing: str) -> Generator[None]:
    """Turn exceptions of environment code into EnvironmentFailed, with the line that raised them."""
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        at = error if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1]
        text = f"{doing} raised {type(error).__name__}: {error} ({at.filename}:{at.lineno})"
        raise EnvironmentFailed(f"environment.name = '{name}': {text}") from error


def _check_methods(environment: Environment, name: str) -> None:
    for method, *arguments in (("tasks", "split"), ("run", "task", "chat"), ("demonstrate", "task", "rng")):
        function = getattr(environment, method, None)
        if method == "demonstrate" and function is None:
            continue  # only needed for a warm start
        wanted = f"{method}({', '.join(arguments)})"
        if not callable(function):
            raise wrong(name, f"it has no method {wanted}")
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise wrong(name, f"{method} cannot be called as {wanted}: {error}") from error
    if not inspect.iscoroutinefunction(inspect.unwrap(environment.run)):
        raise wrong(name, "run is not async; write `async def run(self, task, chat)`")


def _first_tasks(environment: Environment, name: str, split: str) -> list[Task]:
    with their_code(name, f"tasks('{split}')"):
        tasks: Any = environment.tasks(split)
        if not (hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")):
            raise wrong(name, f"tasks('{split}') returned {type(tasks).__name__}; return a list of Task")
        first: list[Any] = list(itertools.islice(tasks, min(len(tasks), MAX_CHECKED)))
    if not first:
        raise wrong(name, f"tasks('{split}') is empty; give 'train' and 'eval' at least one task each")
    for task in first:
        _check_task(task, name, split)
    return first


def _check_task(task: Any, name: str, split: str) -> None:
    if not isinstance(task, Task):
        raise wrong(name, f"tasks('{split}') holds {task!r:.80}; fill it with tandem.types.Task(id, messages, payload)")
    messages = cast(Any, task.messages)
    if not isinstance(messages, tuple | list) or not messages or not all(map(_is_message, cast("list[Any]", messages))):
        example = '({"role": "user", "content": "..."},)'
        raise wrong(name, f"task {task.id!r}: messages = {messages!r:.80}; write {example}")
    if not isinstance(cast(Any, task.id), str):
        raise wrong(name, f"task {task.id!r}: its id must be a text")
    if not isinstance(cast(Any, task.payload), Mapping):
        raise wrong(name, f'task {task.id!r}: payload = {task.payload!r:.80}; write a dict, as in {{"answer": "42"}}')


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and "role" in message and "content" in message
