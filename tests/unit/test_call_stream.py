"""Tool calls in the assistant's text, whole and bit by bit."""

from __future__ import annotations

import random

import pytest

from tandem.text.tool_call_stream import CallStream
from tandem.types import ToolCall

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
CALL = ToolCall("add", {"a": 1, "b": [2]})
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

CASES = {
    "none": ("just text ", "just text ", [], 0),
    "one": (ADD, "", [CALL], 0),
    "after a word": (f"Let me see.\n{ADD}", "Let me see.", [CALL], 0),
    "two": (f"{ADD}\n{NOW}\n", "", [CALL, ToolCall("now", {})], 0),
    "between words": (f"a {ADD} b ", "ab ", [CALL], 0),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', "", [ToolCall("now", {})], 0),
    "no JSON": ("x <tool_call>{nope}</tool_call> y", "x <tool_call>{nope}</tool_call> y", [], 1),
    "NaN": ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, [], 1),
    "no object": ("<tool_call>[1]</tool_call>", None, [], 1),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', None, [], 1),
    "arguments as text": ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, [], 1),
    "nested too deep": (f"<tool_call>{'[' * 5000}</tool_call>", None, [], 1),
    "a wrong one, then a right one": (f"<tool_call></tool_call>\n{NOW}", "<tool_call></tool_call>",
                                      [ToolCall("now", {})], 1),
    "cut": (f'{NOW}\n<tool_call>{{"name": "a', '<tool_call>{"name": "a', [ToolCall("now", {})], 1),
    "half a mark": ("see <tool_ca", "see <tool_ca", [], 0),
    "half a mark before a mark": (f"<tool_{NOW}", "<tool_", [ToolCall("now", {})], 0),
    "one within another": (f"<tool_call>{{ {NOW}!", None, [], 1),
    "the end alone": ("</tool_call>", "</tool_call>", [], 0),
}  # fmt: skip


def parse(text: str) -> tuple[str, list[tuple[str, dict]], int]:
    return bit_by_bit([text])


def bit_by_bit(pieces: list[str]) -> tuple[str, list[tuple[str, dict]], int]:
    stream, content, calls = CallStream(), "", []
    for piece in pieces:
        said, made = stream.push(piece)
        content, calls = content + said, calls + made
    content += stream.close()
    return content, [(call.name, dict(call.arguments)) for call in calls], len(stream.errors)


@pytest.mark.parametrize(("text", "content", "calls", "errors"), CASES.values(), ids=CASES.keys())
def test_calls_are_told_apart_from_content(text: str, content: str | None, calls: list[ToolCall], errors: int) -> None:
    wanted = [(call.name, dict(call.arguments)) for call in calls]
    assert parse(text) == (text if content is None else content, wanted, errors)


@pytest.mark.parametrize("text", [case[0] for case in CASES.values()], ids=CASES.keys())
def test_bit_by_bit_says_the_same(text: str) -> None:
    rng = random.Random(text)
    for _ in range(20):
        pieces, left = [], text
        while left:
            count = rng.randint(1, 7)
            pieces, left = [*pieces, left[:count]], left[count:]
        assert bit_by_bit(pieces) == parse(text)


def test_text_that_can_be_no_call_is_not_held_back() -> None:
    assert CallStream().push("a < b, <tool> c") == ("a < b, <tool> c", [])
