"""Ready reward functions, by name: `reward = "last_number"` or `{ fn = "length", most = 100 }`.

Each factory takes the arguments of its table and returns a function of a reply and its row.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from tandem.env.adapters.math_score import MathScorer
from tandem.env.builtin.reply_parsing import last_number as number_in
from tandem.errors import SpecError
from tandem.spec.load import plain_message
from tandem.types import Message

FIELD = "environment.params.reward"
Row = Mapping[str, Any]
Judge = Callable[[str], Awaitable[str]]
_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL)


def last_number(answer: str = "answer") -> Callable[..., float]:
    """1 if the last number of the reply is the last one of the column `answer`."""

    def score(reply: str, row: Row) -> float:
        right = number_in(str(row[answer]))
        if right is None:
            raise ValueError(f"the column {answer} = {row[answer]!r:.80} holds no number")
        return float(number_in(reply) == right)

    return _needing(score, answer)


def exact(answer: str = "answer", ignore_case: bool = False) -> Callable[..., float]:
    """1 if the reply, without white space around it, is the text in the column `answer`."""

    def score(reply: str, row: Row) -> float:
        said, right = reply.strip(), str(row[answer]).strip()
        return float(said.casefold() == right.casefold() if ignore_case else said == right)

    return _needing(score, answer)


def maths(answer: str = "answer", timeout_s: int = 3) -> Callable[..., Any]:
    """1 if math-verify finds the reply equal to the column `answer`: a number, an expression, or text with \\boxed."""
    _require("maths", "math_verify", "math-verify", "math")
    scorer = MathScorer(timeout_s)

    async def score(reply: str, row: Row) -> float:
        right = str(row[answer])
        marked = right if "\\boxed" in right or "$" in right else f"$\\boxed{{{right}}}$"
        return float((await scorer.score(marked, reply)).correct)

    return _needing(score, answer)


def regex(pattern: str) -> Callable[..., float]:
    """1 if the pattern is found in the reply."""
    try:
        found = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise SpecError(f"{FIELD}: pattern = '{pattern}' of 'regex': is no regular expression: {error}") from error

    def score(reply: str) -> float:
        return float(found.search(reply) is not None)

    return score


def tags(names: list[str]) -> Callable[..., float]:
    """1 if the reply is one block after another, as in `<think>...</think><answer>...</answer>`, and nothing else."""
    blocks = (f"<{re.escape(name)}>(?:(?!</?{re.escape(name)}>).)*</{re.escape(name)}>" for name in names)
    whole = re.compile(r"\s*" + r"\s*".join(blocks) + r"\s*", re.DOTALL)

    def score(reply: str) -> float:
        return float(whole.fullmatch(reply) is not None)

    return score


def length(most: int, least: int = 0, unit: Literal["words", "characters"] = "words") -> Callable[..., float]:
    """1 from `least` to `most` words; less and less outside, 0 for twice as many."""
    if not 0 <= least <= most or most < 1:
        raise SpecError(
            f"{FIELD}: least = {least}, most = {most} of 'length': must be 0 <= least <= most, most above 0"
        )

    def score(reply: str) -> float:
        count = len(reply.split()) if unit == "words" else len(reply)
        if count < least:
            return count / least
        return max(0.0, 1.0 - max(0, count - most) / most)

    return score


def json_schema(schema: dict[str, Any]) -> Callable[..., float]:
    """1 if the reply is JSON that fits the schema; a code fence around it is taken off."""
    _require("json_schema", "jsonschema", "jsonschema", "rewards")
    library: Any = importlib.import_module("jsonschema")
    kind = library.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except library.SchemaError as error:
        raise SpecError(f"{FIELD}: schema of 'json_schema': is no JSON Schema: {error.message}") from error
    validator = kind(schema)

    def score(reply: str) -> float:
        fenced = _FENCE.fullmatch(reply)
        try:
            return float(validator.is_valid(json.loads(fenced[1] if fenced else reply)))
        except (ValueError, RecursionError):
            return 0.0

    return score


def judge(question: str, most: float = 10.0) -> Callable[..., Any]:
    """The last number that [environment.judge] answers, from 0 to `most`, as a share of `most`. `{reply}`, `{prompt}`
    and the columns of the row are filled into `question`."""
    if "{reply}" not in question:
        raise SpecError(f"{FIELD}: question = '{question}' of 'judge': must contain {{reply}}")
    if most <= 0:
        raise SpecError(f"{FIELD}: most = {most} of 'judge': must be positive")

    async def score(reply: str, prompt: object, row: Row, judge: Judge) -> float:
        known = {**row, "prompt": prompt, "reply": reply}
        asked = re.sub(r"\{(\w+)\}", lambda found: str(known.get(found[1], found[0])), question)
        said = number_in(await judge(asked))
        return 0.0 if said is None else min(max(float(said) / most, 0.0), 1.0)

    return score


def reward_model() -> Callable[..., Any]:
    """The score that the reward model of [environment.judge] gives the conversation with this reply."""

    async def score(reply: str, messages: list[Message], judge: Callable[[list[Message]], Awaitable[str]]) -> float:
        return float(await judge([*messages, {"role": "assistant", "content": reply}]))

    return score


READY: dict[str, Callable[..., Callable[..., Any]]] = {
    "last_number": last_number,
    "exact": exact,
    "maths": maths,
    "regex": regex,
    "tags": tags,
    "length": length,
    "json_schema": json_schema,
    "judge": judge,
    "reward_model": reward_model,
}
SAY_CORRECT = (last_number, exact, maths)
"""Those whose 1 means that the answer is right: evaluations then report the share of right answers."""


def make(name: str, table: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function of a ready reward, with the arguments of its table; SpecError for wrong ones."""
    factory = READY[name]
    known = inspect.signature(factory).parameters
    hints = typing.get_type_hints(factory)
    for key, value in table.items():
        if key not in known:
            raise SpecError(f"{FIELD}: {key} = {value!r}: unknown to '{name}'; Known: {', '.join(known)}")
        try:
            TypeAdapter(hints[key]).validate_python(value, strict=True)
        except ValidationError as error:
            raise SpecError(f"{FIELD}: {key} = {value!r} of '{name}': {plain_message(error.errors()[0])}") from error
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in table:
            raise SpecError(f"{FIELD} = '{name}': needs {key}, as in {{ fn = \"{name}\", {key} = ... }}")
    return factory(**table)


def needs_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the columns that a ready reward reads."""
    return getattr(function, "needs", ())


def _needing(function: Any, *columns: str) -> Callable[..., Any]:
    function.needs = columns
    return function


def _require(name: str, module: str, package: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise SpecError(f"{FIELD} = '{name}': needs {package}; pip install 'tandem-rl[{extra}]'")
