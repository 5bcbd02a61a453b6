"""Formats, forced tools and ranked tokens, through the real client, on a random model: what it says follows all the
same."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from served import MODEL, ScriptedEngine, Served, serving

SAY = [{"role": "user", "content": "hi"}]


class Move(BaseModel):
    to: Literal["left", "right"]
    steps: int = Field(ge=0, le=9)


NAMED = {"type": "function", "function": {"name": "move"}}


def tool(name: str = "move") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": Move.model_json_schema()}}


@pytest.fixture(scope="module")
def roomy(make_engine: Any, renderer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(make_engine(), renderer, tmp_path_factory.mktemp("roomy"), context=1024) as served:
        yield served


def chat(served: Served, **options: Any) -> Any:
    with served.openai() as client:
        told: Any = client.chat.completions.create(**{"model": MODEL, "messages": SAY, "max_tokens": 150} | options)
        return list(told) if options.get("stream") else told


def test_parse_gets_what_its_model_says(roomy: Served) -> None:
    with roomy.openai() as client:
        told = client.chat.completions.parse(model=MODEL, messages=SAY, response_format=Move, n=2)  # pyright: ignore
        said = client.responses.parse(model=MODEL, input="hi", text_format=Move)
    assert all(isinstance(choice.message.parsed, Move) for choice in told.choices)
    assert isinstance(said.output_parsed, Move)


def test_objects_have_the_properties_that_are_named_and_no_more(roomy: Served) -> None:
    """One is named as a keyword of schemas."""
    inner = {"type": "object", "properties": {"properties": {"enum": [2]}}, "required": ["properties"]}
    schema = {
        "type": "object",
        "properties": {"in": {"$ref": "#/$defs/in"}},
        "required": ["in"],
        "$defs": {"in": inner},
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(chat(roomy, response_format=form).choices[0].message.content) == {"in": {"properties": 2}}


@pytest.mark.parametrize(("choice", "names"), [("required", {"move", "turn"}), (NAMED, {"move"})])
def test_a_forced_tool_is_called(roomy: Served, choice: Any, names: set[str]) -> None:
    told = chat(roomy, tools=[tool("turn"), tool()], tool_choice=choice, parallel_tool_calls=False, n=4)
    for each in told.choices:
        (called,) = each.message.tool_calls
        assert called.function.name in names
        Move.model_validate_json(called.function.arguments)
        assert (each.finish_reason, each.message.content) == ("tool_calls", None)


def test_a_tool_that_is_not_there_cannot_be_forced(roomy: Served) -> None:
    missing = {"type": "function", "function": {"name": "jump"}}
    for options in ({"tools": [tool()], "tool_choice": missing}, {"tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(roomy, **options)
        assert caught.value.param == "tool_choice"


def test_an_answer_that_may_call_only_once_ends_after_its_first_call(scripted: Served) -> None:
    one = '<tool_call>{"name": "move", "arguments": {"steps": 1}}</tool_call>'
    scripted.engine.script = f"So: {one}{one} Done."
    short = {"type": "function", "function": {"name": "move"}}
    for parallel, calls, said in ((True, 2, "So:Done."), (False, 1, "So:")):
        told = chat(scripted, tools=[short], parallel_tool_calls=parallel)
        (choice,) = told.choices
        assert (len(choice.message.tool_calls), choice.finish_reason) == (calls, "tool_calls")
        assert choice.message.content == said
        ends_early = told.usage.completion_tokens == len(scripted.renderer.encode(f"So: {one}"))
        assert ends_early is not parallel


def test_ranked_tokens_are_the_same_in_a_stream_and_in_a_completion(roomy: Served) -> None:
    asked = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    whole = chat(roomy, **asked).choices[0].logprobs.content
    parts = [each for chunk in chat(roomy, **asked, stream=True) for each in chunk.choices[0].logprobs.content]
    assert [each.to_dict() for each in whole] == [each.to_dict() for each in parts]
    assert all(len(each.top_logprobs) == 3 and each.top_logprobs[0].token == each.token for each in whole)
    with roomy.openai() as client:
        told = client.completions.create(model=MODEL, prompt="a", temperature=0, max_tokens=4, logprobs=2)
    logprobs: Any = told.choices[0].logprobs
    assert [max(each, key=each.get) for each in logprobs.top_logprobs] == logprobs.tokens


def test_a_template_s_options_reach_it_and_no_other_names_do(scripted: Served) -> None:
    plain = {"model": MODEL, "messages": SAY, "return_token_ids": True}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    scripted.engine.script = "so</think>yes"
    free, bound, effort = (scripted.post(plain | more).json() for more in ({}, thinks, {"reasoning_effort": "high"}))
    assert scripted.renderer.decode(bound["prompt_token_ids"]).endswith("<think>")
    assert effort["prompt_token_ids"] == bound["prompt_token_ids"] != free["prompt_token_ids"]
    message = bound["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "yes")
    for name in ("messages", "chat_template", "nothing"):
        refused = scripted.post(plain | {"chat_template_kwargs": {name: "x"}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_an_engine_without_an_option_refuses_it_by_name(scripted: Served) -> None:
    assert isinstance(scripted.engine, ScriptedEngine)
    refused = scripted.post({"model": MODEL, "messages": SAY, "logprobs": True, "top_logprobs": 2}).json()["error"]
    assert refused["param"] == "top_logprobs"
    assert "this engine does not have it" in refused["message"]


def test_a_bias_names_tokens_that_there_are(roomy: Served) -> None:
    assert set(chat(roomy, logit_bias={"65": 100}, temperature=0, max_tokens=3).choices[0].message.content) == {"b"}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(roomy, logit_bias={"999999": 1})
    assert caught.value.param == "logit_bias"
