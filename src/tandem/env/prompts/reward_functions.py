"""Reward functions of a user's file, by path, and how each is called.

A function scores one answer: its first parameter is the reply, the others are found by name among the row's columns,
`prompt`, `messages`, `row` and `judge`. A function with a parameter `completions` is called as TRL calls it: with
lists, which hold one answer here, because each episode is scored on its own.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tandem.env.prompts import ready_rewards
from tandem.errors import EpisodeFailed, SpecError, TandemError
from tandem.io.own_code import import_file
from tandem.spec import others_names
from tandem.types import MAX_NUMBER, NUMBERS, Message

FIELD = "environment.params.reward"
_ANSWERS = ("answer", "solution", "target", "label", "gold", "completion", "output")
_BY_NAME = ("prompt", "messages", "row", "judge")
Item = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """What reward functions can ask for."""

    text: str
    prompt: str | tuple[Message, ...]
    messages: tuple[Message, ...]
    columns: Mapping[str, Any]
    source: str
    """The row, for errors."""
    judge: Callable[[str], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function with its weight. Its values are a metric of its own."""

    fn: str
    """As the spec names it."""
    name: str
    weight: float
    function: Callable[..., Any]
    says_correct: bool = False
    """Whether its value, 0 or 1, says that an answer is right."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the names that the function asks for, columns among them."""
        needs = ready_rewards.needs_of(self.function)
        return needs or tuple(name for name in _parameters(self.function) if name not in _BY_NAME)

    async def value(self, answer: GradedAnswer) -> float | None:
        """Return the reward of one answer; None where the function says that it does not apply. EpisodeFailed names
        function, row and answer."""
        try:
            value = self.function(**self._arguments(answer)) if _in_batches(self.function) else self._one(answer)
            value = await value if inspect.isawaitable(value) else value
        except TandemError:
            raise
        except Exception as error:
            raise self._failed("raised", f"raised {type(error).__name__}: {error}{_line_of(error)}", answer) from error
        if _in_batches(self.function):
            value = self._only(value, answer)
        return None if value is None else self._number(value, answer)

    def check(self, columns: Sequence[str]) -> None:
        """Raise SpecError if the function asks for something that a row with these columns does not have."""
        in_batches = _in_batches(self.function)
        has = ("completions", "prompts", *columns) if in_batches else (*_BY_NAME, *columns)
        parameters = list(_parameters(self.function).values())
        if not in_batches and not parameters:
            raise SpecError(f"{FIELD} = '{self.fn}': takes no argument; its first one is the reply: def f(reply, ...)")
        for column in ready_rewards.needs_of(self.function):
            if column not in columns:
                likely = next((each for each in columns if each in _ANSWERS), columns[-1] if columns else "")
                raise SpecError(
                    f"{FIELD} = '{self.fn}': there is no column '{column}'; name another, as in {{ fn = \"{self.fn}\", "
                    f'answer = "{likely}" }}; the columns: {", ".join(columns)}'
                )
        for each in parameters if in_batches else parameters[1:]:
            needed = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            if needed and each.name not in has:
                raise SpecError(
                    f"{FIELD} = '{self.fn}': asks for {each.name}; there is {', '.join(dict.fromkeys(has))}"
                )

    def _one(self, answer: GradedAnswer) -> object:
        known = {"prompt": answer.prompt, "messages": list(answer.messages), "row": dict(answer.columns)}
        known = {**known, "judge": answer.judge, **answer.columns}
        rest = list(_parameters(self.function).values())[1:]
        takes_any = any(each.kind is each.VAR_KEYWORD for each in rest)
        named = {**answer.columns} if takes_any else {}
        named |= {each.name: known[each.name] for each in rest if each.name in known}
        return self.function(answer.text, **named)

    def _arguments(self, answer: GradedAnswer) -> dict[str, Any]:
        """Return what TRL passes: lists, with strings for a prompt that is a string, and messages for messages."""
        is_chat = not isinstance(answer.prompt, str)
        completion = [{"role": "assistant", "content": answer.text}] if is_chat else answer.text
        prompt = list(answer.prompt) if is_chat else answer.prompt
        columns = {name: [value] for name, value in answer.columns.items() if name not in ("prompt", "completion")}
        known = {**columns, "prompts": [prompt], "completions": [completion]}
        parameters = _parameters(self.function).values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return known
        return {each.name: known[each.name] for each in parameters if each.name in known}

    def _only(self, values: object, answer: GradedAnswer) -> object:
        listed = cast("Any", values)
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or len(listed) != 1:
            text = f"returned {values!r:.80}; with `completions` it returns a list, one number for each answer"
            raise self._failed("not_a_number", text, answer)
        return listed[0]

    def _number(self, value: object, answer: GradedAnswer) -> float:
        try:
            number = math.nan if isinstance(value, str | bytes) else float(cast("Any", value))
        except (TypeError, ValueError):
            number = math.nan
        if not abs(number) <= MAX_NUMBER:  # also NaN
            raise self._failed("not_a_number", f"returned {value!r:.80}; return a finite number, {NUMBERS}", answer)
        return number

    def _failed(self, kind: str, text: str, answer: GradedAnswer) -> EpisodeFailed:
        return EpisodeFailed(kind, f"reward '{self.fn}' {text}; {answer.source}, the answer {answer.text!r:.200}")


async def total(rewards: Sequence[Reward], answer: GradedAnswer) -> tuple[float, dict[str, float]]:
    """Return the weighted sum of all rewards, and each one's value by its name."""
    values = await asyncio.gather(*(reward.value(answer) for reward in rewards))
    found = [(reward, value) for reward, value in zip(rewards, values, strict=True) if value is not None]
    metrics = {reward.name: value for reward, value in found}
    right = [value for reward, value in found if reward.says_correct]
    if len(right) == 1:
        metrics.setdefault("correct", right[0])
    return sum(reward.weight * value for reward, value in found), metrics


def load_rewards(written: Item | Sequence[Item]) -> list[Reward]:
    """Find the functions of `reward = [...]`, as names or as tables with `fn`, `weight`, `name` and arguments."""
    items = [written] if isinstance(written, str | Mapping) else list(written)
    if not items:
        raise SpecError(f'{FIELD} = []: name at least one function, as in reward = "score.py:correct"')
    modules: dict[str, ModuleType] = {}
    rewards = [_load(item, modules) for item in items]
    for name in (names := [reward.name for reward in rewards]):
        if names.count(name) > 1:
            raise SpecError(
                f"{FIELD}: two are called '{name}'; give one another name, as in {{ fn = ..., name = ... }}"
            )
    return rewards


def _load(item: Item, modules: dict[str, ModuleType]) -> Reward:
    table: dict[str, Any] = {"fn": item} if isinstance(item, str) else dict(item)
    fn, weight = table.pop("fn", None), table.pop("weight", 1.0)
    if not isinstance(fn, str):
        raise SpecError(f'{FIELD} = {item}: a table names its function as fn, as in {{ fn = "score.py:brief" }}')
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise SpecError(f"{FIELD}: weight = {weight!r} of '{fn}': must be a number")
    name = table.pop("name", "") or fn.rpartition(":")[2]
    if not isinstance(name, str):
        raise SpecError(f"{FIELD}: name = {name!r} of '{fn}': must be a text")
    if (ready := ready_rewards.READY.get(fn)) is not None:
        return Reward(fn, name, float(weight), ready_rewards.make(fn, table), ready in ready_rewards.SAY_CORRECT)
    function = _function(fn, modules)
    known = _parameters(function)
    for key in table:
        if key not in known and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            raise SpecError(f"{FIELD}: {key} = {table[key]!r}: '{fn}' has no such parameter; it has {', '.join(known)}")
    return Reward(fn, name, float(weight), functools.partial(function, **table) if table else function)


def _function(fn: str, modules: dict[str, ModuleType]) -> Callable[..., Any]:
    place, _, wanted = fn.rpartition(":")
    if fn.endswith(".py"):
        place, wanted = fn, ""
    if not place:
        known = ", ".join(ready_rewards.READY)
        meant = f"write {ours}; " if (ours := others_names.REWARDS.get(fn)) else ""
        raise SpecError(f"{FIELD} = '{fn}': unknown; {meant}ready ones: {known}; your own: path/to/file.py:function")
    module = modules[place] if place in modules else modules.setdefault(place, _module(fn, place))
    function = getattr(module, wanted, None)
    if callable(function):
        return function
    own = [name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"]
    listed = ", ".join(f"{place}:{name}" for name in own) or "none"
    problem = f"no function '{wanted}' in it" if wanted else "name a function of it"
    raise SpecError(f"{FIELD} = '{fn}': {problem}; its functions: {listed}")


def _module(fn: str, place: str) -> ModuleType:
    path = Path(place)
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        if not path.is_file():
            raise SpecError(f"{FIELD} = '{fn}': no such file, neither beside the spec nor in {Path.cwd()}")
        return import_file(path)
    except TandemError:
        raise
    except Exception as error:
        raise SpecError(
            f"{FIELD} = '{fn}': importing it raised {type(error).__name__}: {error}{_line_of(error)}"
        ) from error


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # a built-in without a signature
        return {"reply": inspect.Parameter("reply", inspect.Parameter.POSITIONAL_ONLY)}


def _in_batches(function: Callable[..., Any]) -> bool:
    return "completions" in _parameters(function)


def _line_of(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
