"""`/v1/responses`: the real client, whole and streamed; what is said, thought and called, and what is refused."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from served import MODEL, Served

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key not in ("id", "call_id", "item_id")}
    return value


def test_a_stream_ends_with_what_the_whole_response_says(scripted: Served) -> None:
    scripted.engine.script = f"Let me see. {CALL}"
    with scripted.openai() as client:
        whole = client.responses.create(model=MODEL, input="1 + 1", tools=[TOOL])  # pyright: ignore
        events: list[Any] = list(client.responses.create(model=MODEL, input="1 + 1", tools=[TOOL], stream=True))  # pyright: ignore
    said, called = whole.output
    assert (said.type, said.content[0].text, called.type) == ("message", "Let me see.", "function_call")  # pyright: ignore
    assert (called.name, called.arguments, whole.status) == ("add", '{"a": 1}', "completed")  # pyright: ignore
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert without_ids(events[-1].response.to_dict()["output"]) == without_ids(whole.to_dict()["output"])
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert ("".join(deltas), len(deltas) > 3) == ("Let me see.", True)
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith("text.delta")]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip


def test_a_conversation_is_sent_whole_and_read_as_a_chat_is(scripted: Served) -> None:
    scripted.engine.script = "2"
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "So", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    items: Any = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + 1"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "So", "annotations": []}]},
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
    ]
    with scripted.openai() as client:
        told = client.responses.create(model=MODEL, input=items, instructions="Add.")
    asked = scripted.post({"model": MODEL, "messages": chat, "return_token_ids": True}).json()
    assert (told.output_text, told.usage and told.usage.input_tokens) == ("2", len(asked["prompt_token_ids"]))


def test_a_thought_is_an_item_of_its_own_and_a_cut_answer_is_incomplete(scripted: Served) -> None:
    scripted.engine.script = "hm</think>yes and more"
    with scripted.openai() as client:
        told = client.responses.create(model=MODEL, input="x", reasoning={"effort": "low"}, max_output_tokens=6)
    thought, said = told.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")  # pyright: ignore
    assert (said.type, said.status, told.status) == ("message", "incomplete", "incomplete")  # pyright: ignore
    assert told.to_dict()["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_failure_in_a_stream_is_its_last_event(scripted: Served) -> None:
    scripted.engine.script, scripted.engine.error_after = "hello", 2
    with scripted.openai() as client:
        events: list[Any] = list(client.responses.create(model=MODEL, input="x", stream=True))
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert "the script says so" in events[-1].response.error.message


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": "x" * 300}, "input"),
        ({"max_output_tokens": 500}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"temperature": 9.0}, "temperature"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_a_service_that_keeps_nothing_cannot_do_is_refused(
    scripted: Served, change: dict[str, Any], field: str
) -> None:
    answer = scripted.post({"model": MODEL, "input": "x"} | change, "/v1/responses")
    assert (answer.status_code, answer.json()["error"].get("param")) == (400, field)


def test_what_openai_has_besides_is_refused_in_words(scripted: Served) -> None:
    with scripted.openai() as client:
        for asked in (
            lambda: client.embeddings.create(model=MODEL, input="x"),
            lambda: client.moderations.create(input="x"),
            lambda: client.responses.retrieve("resp_1"),
        ):
            with pytest.raises(openai.NotFoundError, match="this service"):
                asked()


def test_tokens_are_counted_as_prompts_are(scripted: Served) -> None:
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "grüße"}]
    prompt = scripted.renderer.prompt([{"role": "system", "content": "x"}, messages[1]])
    told = scripted.post({"messages": messages, "return_token_strs": True}, "/tokenize").json()
    assert (told["tokens"], told["count"], len(told["token_strs"])) == (prompt, len(prompt), len(prompt))
    assert told["max_model_len"] == 256
    ids = scripted.post({"prompt": "grüße"}, "/tokenize").json()["tokens"]
    assert scripted.post({"tokens": ids}, "/detokenize").json() == {"prompt": "grüße"}
    assert scripted.post({"tokens": [10**6]}, "/detokenize").status_code == 422
    assert scripted.post({"prompt": "x", "messages": messages}, "/tokenize").status_code == 422
    with scripted.http() as client:
        assert client.get("/version").json()["version"]
