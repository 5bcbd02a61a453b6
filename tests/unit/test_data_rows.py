"""Which rows become conversations, and why others do not."""

from __future__ import annotations

import json

import pytest

from tandem.data.conversation import BadRow, parse_row
from tandem.data.row_report import ValidationReport

USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, BOT]},
        {"messages": [USER, BOT], "prompt": "other", "id": 7},
        {"messages": None, "prompt": "hi", "completion": "hello"},
        {"prompt": "hi", "completion": [BOT]},
        {"prompt": [USER], "completion": "hello", "score": float("nan")},
        {"messages": [{**USER, "name": None, "weight": 1}, {**BOT, "tool_calls": None, "tool_call_id": None}]},
        {"messages": ({**USER, "tool_calls": []}, BOT)},
        {"messages": json.dumps([USER, BOT])},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [USER, BOT], "system": ""},
        {"instruction": "hi", "input": "", "output": "hello", "text": "### hi"},
    ],
)
def test_every_good_shape_gives_the_same_messages(row):
    assert parse_row(row) == (USER, BOT)


def test_an_alpaca_row_has_its_input_below_and_its_system_text_above():
    row = {"instruction": "Add.", "input": "2 and 3", "output": "5", "system": "Be brief."}
    assert [(each["role"], each["content"]) for each in parse_row(row)] == [
        ("system", "Be brief."), ("user", "Add.\n\n2 and 3"), ("assistant", "5")
    ]  # fmt: skip


def test_several_turns_and_tools_are_kept():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "be brief"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
        {"role": "assistant", "content": "3", "reasoning_content": "easy"},
    ]
    assert parse_row({"messages": messages}) == (
        *messages[:2],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        *messages[3:],
    )


def deep(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (["hi"], "not an object"),
        (None, "not an object"),
        (BadRow("not JSON"), "not JSON"),
        ({"text": "hi"}, "no conversation in its columns (text)"),
        ({"prompt": "hi"}, "no conversation in its columns (prompt)"),
        ({"prompt": "hi", "completion": None}, "no conversation in its columns (prompt, completion)"),
        ({"messages": []}, "no messages"),
        ({"messages": "hi"}, "messages are not a list"),
        ({"prompt": 5, "completion": "5"}, "messages are not a list"),
        ({"messages": ["hi"]}, "a message is not an object"),
        ({"messages": [{"content": "hi"}, BOT]}, "a message without role"),
        ({"messages": [{"from": "human", "value": "hi"}]}, "no assistant turn"),
        ({"conversations": [{"from": "narrator", "value": "hi"}]}, "unknown role in from"),
        ({"conversations": [{"from": "human"}]}, "empty content"),
        ({"instruction": "add", "output": ""}, "empty content"),
        ({"messages": [{"role": "human", "content": "hi"}, BOT]}, "unknown role"),
        ({"messages": [{"role": ["user"], "content": "hi"}, BOT]}, "unknown role"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": [USER, BOT, USER]}, "the last turn is not the assistant's"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty content"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "empty content"),
        ({"messages": [USER, {"role": "assistant"}]}, "empty content"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": []}]}, "empty content"),
        ({"prompt": "", "completion": "x"}, "empty content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, BOT]}, "content is not text"),
        ({"messages": [USER, {**BOT, "reasoning_content": 5}]}, "reasoning_content is not text"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": "add"}]}, "tool_calls are not a list of objects"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": ["add"]}]}, "tool_calls are not a list of objects"),
        ({"prompt": "hi", "completion": "\ud800"}, "text that is not Unicode (a lone surrogate)"),
        ({"messages": [USER, {**BOT, "tool_calls": [{"x": "\udfff"}]}]}, "text that is not Unicode (a lone surrogate)"),
        ({"messages": [USER, {**BOT, "tool_calls": [{"x": b"bytes"}]}]}, "a value that is not JSON"),
        ({"messages": [USER, {**BOT, "tool_calls": [{"x": deep(100_000)}]}]}, "a value that is not JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_row_has_its_reason(row, reason):
    with pytest.raises(BadRow) as bad:
        parse_row(row)
    assert str(bad.value) == reason


def test_a_surrogate_pair_is_one_character_and_fine():
    row = json.loads('{"prompt": "hi", "completion": "\\ud83d\\ude00"}')
    assert parse_row(row)[1]["content"] == "😀"


def test_the_report_counts_reasons_and_shows_the_first_rows_of_each():
    report = ValidationReport(read=10)
    for row in (2, 3, 5, 8):
        report.drop("a.jsonl", row, "empty content")
    report.drop("b.jsonl", 1, "not JSON")
    assert report.used == 5
    assert report.by_reason() == {"empty content": 4, "not JSON": 1}
    assert report.text() == (
        "10 rows read, 5 used, 5 left out\n"
        "  4 x empty content (a.jsonl:2, a.jsonl:3, a.jsonl:5, ...)\n"
        "  1 x not JSON (b.jsonl:1)"
    )
