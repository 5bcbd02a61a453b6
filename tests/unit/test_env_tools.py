"""Tools: functions as JSON schema, and answers to valid and invalid calls."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional

import pytest
from chat_tokenizers import CHATML, chatml_tokenizer
from typing_extensions import TypedDict

from tandem.env.human_player import HumanChat
from tandem.env.tools import MAX_CALLS, MAX_CHARS, Tools, schema_of
from tandem.errors import EpisodeFailed, SpecError, TemplateError
from tandem.io.tool_calls import parse_calls
from tandem.rollout.deadlines import Clock
from tandem.rollout.recorder import Recorder
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Sampling, Span, Task, ToolCall, Trajectory

# --- schemas


@dataclass
class Place:
    city: str
    zip: Optional[int] = None  # noqa: UP045 - as many write it


class Filter(TypedDict):
    field: str
    value: float


def book(place: Place, nights: int, kind: Literal["single", "double"] = "single", tags: list[str] = [], *,  # noqa: B006
         filters: dict[str, Filter] | None = None, late: bool = False, price: float = 1.5) -> str:  # fmt: skip
    """Book a room,
    at once.

    More that only people read.

    Args:
        place: Where
            it should be.
        nights (int): How long.
    """
    return json.dumps([place.city, nights, kind, tags, filters, late, price])


def test_a_signature_and_its_docstring_become_a_schema():
    place = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "zip": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "required": ["city"],
        "additionalProperties": False,
        "description": "Where it should be.",
    }
    made = schema_of(book)["function"]
    assert (made["name"], made["description"]) == ("book", "Book a room, at once.")
    properties = made["parameters"]["properties"]
    assert properties["place"] == place
    assert properties["nights"] == {"type": "integer", "description": "How long."}
    assert properties["kind"] == {"type": "string", "enum": ["single", "double"], "default": "single"}
    assert properties["tags"] == {"type": "array", "items": {"type": "string"}, "default": []}
    assert properties["late"] == {"type": "boolean", "default": False}
    assert properties["price"] == {"type": "number", "default": 1.5}
    assert properties["filters"]["anyOf"][0]["additionalProperties"]["required"] == ["field", "value"]
    assert made["parameters"]["required"] == ["place", "nights"]
    assert made["parameters"]["additionalProperties"] is False
    assert "$ref" not in json.dumps(made)


def test_a_rest_docstring_and_a_method_make_a_schema_too():
    class Board:
        def move(self, to: str) -> str:
            """Move there.

            :param to: A field, such as e4.
            """
            return to

    assert schema_of(Board().move)["function"] == {
        "name": "move",
        "description": "Move there.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string", "description": "A field, such as e4."}},
            "required": ["to"],
            "additionalProperties": False,
        },
    }


def untyped(a) -> str: ...
def starred(*a: int) -> str: ...
def strange(a: NoSuchType) -> str: ...  # noqa: F821


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (untyped, "tool untyped: parameter a has no type"),
        (starred, "name every parameter"),
        (strange, "its annotations cannot be read"),
        (lambda: Tools(book, book), "have the same name"),
    ],
)
def test_what_has_no_schema_is_refused_by_name(function, said):
    with pytest.raises(SpecError, match=said):
        function() if function.__name__ == "<lambda>" else Tools(function)


# --- calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_calls_are_told_apart_from_the_text():
    said, calls = parse_calls(f"Let me see.\n{CALL}\n{CALL} So.")
    assert said == "Let me see.\n\n So."
    assert [(call.name, call.arguments, call.error) for call in calls] == [("add", {"a": 1}, "")] * 2
    assert parse_calls("no call, as it is ") == ("no call, as it is ", [])


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{", "not JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "not JSON"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no JSON object"),
        ('{"arguments": {}}', "no name"),
        ('{"name": 5}', "no name"),
        ('{"name": "add", "arguments": "{}"}', "the arguments of 'add' are no JSON object"),
    ],
)
def test_a_call_that_cannot_be_read_is_data(written: str, said: str):
    _, (call,) = parse_calls(f"<tool_call>{written}</tool_call>")
    assert said in call.error
    assert (call.name, call.raw) == ("", written)


def test_a_call_that_is_not_closed_is_data():
    _, (call,) = parse_calls('<tool_call>{"name": "add"}')
    assert "not closed" in call.error


# --- answers


def add(a: int, b: int = 0) -> int:
    return a + b


async def slow() -> str:
    await asyncio.sleep(30)
    return ""


def blocks() -> str:
    time.sleep(2)
    return ""


def breaks() -> str:
    raise KeyError("x")


def stops() -> str:
    raise StopIteration


def talks() -> str:
    return "x" * (MAX_CHARS + 7)


def halves() -> dict[str, str]:
    return {"is": "\ud800"}


TOOLS = Tools(add, slow, blocks, breaks, stops, talks, halves, book, timeout_s=0.4)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (ToolCall("add", {"a": 1, "b": 2}), "3"),
        (ToolCall("add", {"a": "1"}), "error: a: Input should be a valid integer"),
        (ToolCall("add", {"a": True}), "error: a: Input should be a valid integer"),
        (ToolCall("add", {}), "error: a: Field required"),
        (ToolCall("add", {"a": 1, "c": 1}), "error: c: Extra inputs are not permitted"),
        (ToolCall("subtract", {}), "error: no tool is called 'subtract'; there are: add, slow"),
        (ToolCall("", {}, "it is not JSON"), "error: this tool call cannot be read: it is not JSON"),
        (ToolCall("slow", {}), "error: slow gave no answer within 0.4 s"),
        (ToolCall("blocks", {}), "error: blocks gave no answer within 0.4 s"),
        (ToolCall("breaks", {}), "error: KeyError: 'x'"),
        (ToolCall("stops", {}), "error: RuntimeError: StopIteration"),
        (ToolCall("talks", {}), "x" * MAX_CHARS + "... (7 characters more)"),
        (ToolCall("halves", {}), '{"is": "?"}'),
        (ToolCall("book", {"place": {"city": "Rome"}, "nights": 2, "filters": {"a": {"field": "f", "value": 1}}}),
         '["Rome", 2, "single", [], {"a": {"field": "f", "value": 1.0}}, false, 1.5]'),
        (ToolCall("book", {"place": {"town": "Rome"}, "nights": 2}), "error: place.city: Field required"),
    ],
)  # fmt: skip
def test_every_call_has_an_answer(call: ToolCall, said: str):
    (message,) = asyncio.run(TOOLS.answer([call]))
    assert message["role"] == "tool"
    assert message["content"].startswith(said)


def test_too_many_calls_of_a_turn_are_answered_without_being_made():
    answers = asyncio.run(TOOLS.answer([ToolCall("add", {"a": 1})] * (MAX_CALLS + 2)))
    assert [message["content"] for message in answers[-3:]] == ["1", *[answers[-1]["content"]] * 2]
    assert "only 16 calls" in answers[-1]["content"]


# --- recorded token by token

WITH_TOOLS = CHATML.replace(
    "{%- for message in messages -%}\n{%- if message.role == 'user'",
    "{%- if tools -%}{{- '<|im_start|>system\\n' -}}{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}"
    "{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endif -%}\n"
    "{%- for message in messages -%}\n{%- if message.role == 'user'",
    1,
).replace("{%- elif message.role == 'tool' -%}", "{%- elif message.role == 'tool' and tools -%}")
TASK = Task("t", ({"role": "user", "content": "1+2?"},))


class Scripted:
    version = 3

    def __init__(self, renderer: Renderer, turns: Sequence[str]) -> None:
        self._turns = [renderer.encode(turn) for turn in turns]
        self.prompts: list[list[int]] = []
        self.said: list[list[int]] = []

    async def generate(self, prompt_ids, sampling, *, session=None, on_token=None) -> Completion:
        self.prompts.append(list(prompt_ids))
        ids = self._turns[len(self.said)]
        self.said.append(ids)
        return Completion(ids, [-1.0] * len(ids), [Span(3, len(ids))], "stop")


def play(renderer: Renderer, turns: Sequence[str], episode: Any) -> tuple[Trajectory, Scripted, Any]:
    engine = Scripted(renderer, turns)
    recorder = Recorder(
        engine, renderer, TASK, renderer.prompt(TASK.messages), Sampling(), max_context=9999, deadline_s=5.0, seed=0,
        clock=Clock(),
    )  # fmt: skip
    result = asyncio.run(episode(recorder))
    return recorder.trajectory(1.0, {}), engine, result


async def ask_tools(chat: Any) -> Any:
    chat.offer(TOOLS.schemas[:1])
    return await TOOLS.play(chat)


CASES = {
    "ours": (byte_tokenizer(), "<|end|>", "<|tool|>3<|end|><|tool|>error: no tool is called 'sub'"),
    "chatml": (chatml_tokenizer(WITH_TOOLS), "<|im_end|>", "<tool_response>\n3\n</tool_response>"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("thinking", [False, True])
def test_the_trajectory_of_a_conversation_with_tools_is_what_the_engine_saw_and_said(name: str, thinking: bool):
    tokenizer, end, told = CASES[name]
    renderer = Renderer(tokenizer, thinking=thinking)
    # In a thought, a call is none; spaces within JSON are kept as they were sampled.
    thought = "<tool_call>{}</tool_call> hm</think>" if thinking and name == "ours" else ""
    calls = (
        '<tool_call>{"name":  "add", "arguments": {"a": 1, "b": 2}}</tool_call><tool_call>{"name": "sub"}</tool_call>'
    )
    trajectory, engine, last = play(renderer, [f"{thought}{calls}{end}", f"{thought and '</think>'}3{end}"], ask_tools)
    assert last.text == "3"
    assert last.tool_calls == ()
    assert trajectory.ids[: len(engine.prompts[0])] == engine.prompts[0]
    assert trajectory.ids == engine.prompts[1] + engine.said[1]
    assert engine.prompts[1][: len(engine.prompts[0]) + len(engine.said[0])] == engine.prompts[0] + engine.said[0]
    sampled = [token for token, trained in zip(trajectory.ids, trajectory.trained, strict=True) if trained]
    assert sampled == engine.said[0] + engine.said[1]
    text = renderer.decode(trajectory.ids, skip_special=False)
    assert '"name": "add"' in text.partition("1+2?")[0]
    assert told in text
    assert trajectory.metrics == {"tool_calls": 2.0, "unreadable_tool_calls": 0.0}
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "tool", "assistant"]


def test_a_template_without_tools_refuses_them_and_the_text_stays_text_unless_tools_were_offered():
    renderer = Renderer(chatml_tokenizer())
    with pytest.raises(TemplateError, match="ignores tools"):
        play(renderer, ["3<|im_end|>"], ask_tools)

    async def offers_nothing(chat: Any) -> Any:
        return await chat.reply()

    trajectory, _, reply = play(renderer, [f"{CALL}<|im_end|>"], offers_nothing)
    assert (reply.text, reply.tool_calls, trajectory.metrics) == (CALL, (), {})


def test_tools_are_offered_before_the_first_reply():
    async def late(chat: Any) -> None:
        await chat.reply()
        chat.offer(TOOLS.schemas)

    with pytest.raises(EpisodeFailed, match="offer tools before"):
        play(Renderer(byte_tokenizer()), ["3<|end|>"], late)


def test_a_conversation_stops_asking_after_the_most_replies():
    async def few(chat: Any) -> Any:
        chat.offer(TOOLS.schemas)
        return await TOOLS.play(chat, most=2)

    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>'
    trajectory, _, reply = play(Renderer(byte_tokenizer()), [call, call], few)
    assert len(reply.tool_calls) == 1
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_person_asks_tools_too():
    lines, typed = list[str](), iter(['<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>', "done", "7"])
    chat = HumanChat(lambda _: next(typed), lines.append)

    async def episode() -> tuple[str, str]:
        chat.offer(TOOLS.schemas[:1])
        return (await TOOLS.play(chat)).text, await chat.judge([{"role": "user", "content": "1 to 10?"}])

    assert asyncio.run(episode()) == ("done", "7")
    assert any("tool> 4" in line for line in lines)
