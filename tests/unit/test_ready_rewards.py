"""What each ready reward gives for which reply."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from typing import Any

import pytest

from tandem.env.prompts.ready_rewards import READY, make
from tandem.env.prompts.reward_functions import load_rewards
from tandem.errors import SpecError

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
GIVEN: list[tuple[str, dict[str, Any], str, Any, float]] = [
    ("last_number", {}, "First 3, so it is 1,200.", "#### 1200", 1.0),
    ("last_number", {}, "It is 12 or 13", 12, 0.0),
    ("last_number", {}, "I do not know", "5", 0.0),
    ("last_number", {}, "-4.50", "-4.5", 1.0),
    ("exact", {}, " billing\n", "billing", 1.0),
    ("exact", {}, "Billing", "billing", 0.0),
    ("exact", {"ignore_case": True}, "Billing", "billing", 1.0),
    ("regex", {"pattern": r"^\w+$"}, "one", None, 1.0),
    ("regex", {"pattern": r"^\w+$"}, "one two", None, 0.0),
    ("tags", {"names": ["think", "answer"]}, "<think>a\nb</think>\n<answer>4</answer>\n", None, 1.0),
    ("tags", {"names": ["think", "answer"]}, "<think>a</think><answer>4</answer> and more", None, 0.0),
    ("tags", {"names": ["think", "answer"]}, "<think>a</think><think>b</think><answer>4</answer>", None, 0.0),
    ("tags", {"names": ["think"]}, "<think><think>a</think>", None, 0.0),
    ("length", {"most": 4}, "one two three four", None, 1.0),
    ("length", {"most": 4}, "a b c d e f", None, 0.5),
    ("length", {"most": 4}, "a b c d e f g h i j", None, 0.0),
    ("length", {"most": 4, "least": 2}, "one", None, 0.5),
    ("length", {"most": 4, "unit": "characters"}, "abcdef", None, 0.5),
    ("maths", {}, "So it is $\\frac{1}{2}$.", "0.5", 1.0),
    ("maths", {}, "So it is $\\boxed{x+1}$.", "\\boxed{1+x}", 1.0),
    ("maths", {}, "So it is 3.", "4", 0.0),
    ("json_schema", {"schema": SCHEMA}, '{"n": 3}', None, 1.0),
    ("json_schema", {"schema": SCHEMA}, '```json\n{"n": 3}\n```\n', None, 1.0),
    ("json_schema", {"schema": SCHEMA}, '{"n": "3"}', None, 0.0),
    ("json_schema", {"schema": SCHEMA}, "no", None, 0.0),
]


@pytest.mark.parametrize(
    ("name", "table", "reply", "answer", "reward"), GIVEN, ids=[f"{n}-{r[:20]}" for n, _, r, _, _ in GIVEN]
)
def test_a_ready_reward_gives(name: str, table: dict[str, Any], reply: str, answer: Any, reward: float):
    if name == "json_schema":
        pytest.importorskip("jsonschema")
    function = make(name, table)
    wants_row = "row" in inspect.signature(function).parameters
    value = function(reply, {"answer": answer}) if wants_row else function(reply)
    assert (asyncio.run(value) if inspect.isawaitable(value) else value) == reward


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("maths", "math-verify", "math"), ("json_schema", "jsonschema", "rewards")]
)
def test_one_that_needs_a_package_is_refused_by_name_without_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    said = rf"reward = '{name}': needs {package}; pip install 'tandem-rl\[{extra}\]'"
    with pytest.raises(SpecError, match=said):
        load_rewards({"fn": name, "schema": SCHEMA} if name == "json_schema" else name)


@pytest.mark.parametrize("asked", ["judge", "{reply}"])
def test_a_judge_s_number_is_a_share_of_the_most(asked: str):
    with pytest.raises(SpecError, match=r"must contain \{reply\}"):
        make("judge", {"question": "How good?"})
    asked_for: list[str] = []

    async def judge(question: str) -> str:
        asked_for.append(question)
        return "I say 12" if asked == "judge" else "no number"

    score = make("judge", {"question": "{prompt} {tone}: {reply} {unknown}"})
    value = asyncio.run(score("hi", "Greet", {"tone": "warm"}, judge))
    assert value == (1.0 if asked == "judge" else 0.0)
    assert asked_for == ["Greet warm: hi {unknown}"]


def test_a_wrong_schema_is_refused_before_the_run():
    pytest.importorskip("jsonschema")
    with pytest.raises(SpecError, match="is no JSON Schema"):
        make("json_schema", {"schema": {"type": "objekt"}})


def test_every_ready_reward_is_in_the_docs():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "your_data.md").read_text()
    assert [name for name in READY if f"| `{name}` |" not in page] == []
