"""Agents that use tools by the OpenAI client and by LangChain, and agents that send text or token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_served import Gateway, Says, gateway_serving
from served import MODEL

from tandem.text.renderer import Renderer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
NEXT = 'I need the sum.\n<tool_call>\n{"name": "add", "arguments": {"a": 1.0, "b":2, "grüße": "né"}}\n</tool_call>'
TWO = (
    '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {"a": 5, "b": 6}}</tool_call>'
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def _said(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway_serving(Says(renderer, "x"), renderer, tmp_path_factory.mktemp("said")) as gateway:
        yield gateway


@pytest.fixture
def said(_said: Gateway) -> Gateway:
    """An engine that follows scripts; its log is the same log."""
    _said.engine.log.clear()
    return _said


@pytest.fixture(scope="module")
def _random(make_engine: Any, renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway_serving(make_engine(), renderer, tmp_path_factory.mktemp("random")) as gateway:
        yield gateway


@pytest.fixture
def random_model(_random: Gateway) -> Gateway:
    _random.engine.log.clear()
    return _random


def script(gateway: Gateway, *scripts: str) -> None:
    gateway.engine.engine.scripts = list(scripts)


# --- tools


@pytest.mark.parametrize("stream", [False, True])
def test_an_openai_loop_with_tools(said: Gateway, stream: bool) -> None:
    """As OpenAI's own guide writes it: the answer's message goes back as it came."""
    script(said, NEXT, TWO, "It is 14.")
    session, messages, calls = said.open(), list[Any]([user("1 + 2, then 3 + 4 and 5 + 6")]), 0
    with said.openai(session) as client:
        for _ in range(5):
            if stream:
                with client.chat.completions.stream(model=MODEL, messages=messages, tools=[ADD]) as events:  # pyright: ignore
                    message = events.get_final_completion().choices[0].message
            else:
                answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # pyright: ignore
                message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                calls += 1
                assert set(json.loads(call.function.arguments)) >= {"a", "b"}  # pyright: ignore
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
    assert (calls, messages[-1].content) == (3, "It is 14.")
    ids = [call.id for message in messages if hasattr(message, "content") for call in message.tool_calls or []]
    assert len(set(ids)) == 3
    turns = said.shown(session)["turns"]
    assert [call["id"] for turn in turns for call in turn["told"].get("tool_calls", [])] == ids
    assert NEXT in said.renderer.decode(turns[0]["ids"])
    assert said.check(session) == [["0-1-2"]]


def as_langchain_says_it_again(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a reply as LangChain does: it parses and rewrites arguments, and drops unknown fields."""
    calls = [
        {
            "type": "function",
            "id": call["id"],
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":")),
            },
        }
        for call in message.get("tool_calls", [])
    ]
    return {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}


def test_a_langchain_loop_with_tools_and_no_session(said: Gateway) -> None:
    script(said, NEXT, TWO, "It is 14.")
    messages = [{"role": "system", "content": "use tools"}, user("sums")]
    while True:
        answer = said.chat(messages, tools=[ADD], tool_choice="auto", n=1, temperature=0.7, parallel_tool_calls=True)
        message = answer["choices"][0]["message"]
        messages.append(as_langchain_says_it_again(message))
        if not message.get("tool_calls"):
            break
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        messages += [{"role": "tool", "content": "7", "tool_call_id": call["id"]} for call in message["tool_calls"]]
    assert said.check(answer["session_id"]) == [["0-1-2"]]


def test_other_arguments_and_other_tools_are_an_edit(said: Gateway) -> None:
    script(said, NEXT, "3", "4", "5", "6")
    session, opening = said.open(), [user("1 + 2")]
    call = said.say(opening, session, tools=[ADD])
    answered = [{"role": "tool", "content": "3", "tool_call_id": call["tool_calls"][0]["id"]}]
    said.say([*opening, call, *answered], session, tools=[ADD])
    changed = json.loads(json.dumps(call))
    changed["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "b": 2, "grüße": "né"}'
    said.say([*opening, changed, *answered], session, tools=[ADD])
    said.say([*opening, call, *answered], session, tools=[])
    none = said.chat([*opening, call, *answered], session, tools=[ADD], tool_choice="none")["choices"][0]
    assert none["message"]["content"] == "6"
    assert said.check(session) == [["0-1", "0-4", "2", "3"]]


def test_a_call_that_cannot_be_read_stays_in_the_content(said: Gateway) -> None:
    broken = '<tool_call>{"name": "add", "arguments": </tool_call>'
    script(said, broken, "well")
    session, opening = said.open(), [user("1 + 2")]
    message = said.say(opening, session, tools=[ADD])
    assert (message["content"], "tool_calls" in message) == (broken, False)
    said.say([*opening, message, user("try again")], session, tools=[ADD])
    assert said.check(session) == [["0-1"]]


def test_equal_calls_of_two_branches_are_told_apart_by_their_ids(said: Gateway) -> None:
    script(said, TWO)
    session, opening = said.open(), [user("sums")]
    answer = said.chat(opening, session, tools=[ADD], n=2)
    for choice in answer["choices"]:
        message = choice["message"]
        results = [{"role": "tool", "content": "7", "tool_call_id": call["id"]} for call in message["tool_calls"]]
        said.chat([*opening, message, *results], session, tools=[ADD], tool_choice="none")
    assert said.check(session) == [["0-2", "1-3"]]


# --- text and token ids


@pytest.mark.parametrize("form", ["openai", "vllm", "sglang"])
def test_token_ids_that_go_on_from_token_ids_are_one_branch(random_model: Gateway, form: str) -> None:
    session, ids = random_model.open(), random_model.renderer.encode("once upon a time")
    for seed in range(3):
        ids += generate(random_model, form, ids, session, seed)
        ids += random_model.renderer.encode(" and then")
    assert random_model.check(session) == [["0-1-2"]]


def generate(gateway: Gateway, form: str, ids: list[int], session: str, seed: int) -> list[int]:
    if form == "openai":
        body = {"model": MODEL, "prompt": ids, "max_tokens": 15, "seed": seed, "return_token_ids": True}
        return gateway.post(f"/sessions/{session}/v1/completions", body).json()["choices"][0]["token_ids"]
    if form == "vllm":
        body = {"prompt": {"prompt_token_ids": ids}, "logprobs": 0, "max_tokens": 15, "seed": seed, "temperature": 1.0}
        told = gateway.post(f"/sessions/{session}/generate", body).json()
        assert told["prompt_token_ids"] == ids
        pairs = [next(iter(item[0].items())) for item in told["logprobs"][0]]
        assert [int(id) for id, _ in pairs] == told["token_ids"][0]
        assert [logprob for _, logprob in pairs] == gateway.engine.log[-1][1].logprobs
        assert told["finish_reasons"][0] in ("stop", "length")
        return told["token_ids"][0]
    knobs = {"max_new_tokens": 15, "temperature": 1.0, "top_k": -1, "sampling_seed": seed}
    body = {"input_ids": ids, "sampling_params": knobs, "return_logprob": True, "return_text_in_logprobs": False}
    told = gateway.post(f"/sessions/{session}/generate", body).json()
    pairs = told["meta_info"]["output_token_logprobs"]
    assert [logprob for logprob, _, _ in pairs] == gateway.engine.log[-1][1].logprobs
    assert told["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    assert told["output_ids"] == [id for _, id, _ in pairs]
    return told["output_ids"]


def test_generate_takes_text_several_prompts_and_several_samples(random_model: Gateway) -> None:
    vllm = random_model.post("/generate", {"prompt": "once", "n": 3, "max_tokens": 4, "stream": False}).json()
    assert len(vllm["text"]) == len(vllm["token_ids"]) == len(vllm["finish_reasons"]) == 3
    assert vllm["prompt"] == "once"
    assert "logprobs" not in vllm
    body = {"text": ["once", "twice"], "sampling_params": {"max_new_tokens": 4, "n": 2}}
    several = random_model.post("/generate", body).json()
    assert [len(each["output_ids"]) <= 4 for each in several] == [True] * 4
    sessions = [each["meta_info"]["session_id"] for each in several]
    assert (sessions[0], sessions[2]) == (sessions[1], sessions[3])
    assert sessions[0] != sessions[2], "each prompt is a conversation of its own"
    assert random_model.post(f"/sessions/{sessions[0]}/reward", {"reward": 1}).status_code == 200
    one = random_model.post("/generate", {"text": "once", "sampling_params": {"max_new_tokens": 4}}).json()
    assert set(one) == {"text", "output_ids", "meta_info", "session_id", "turn_ids"}
    for body, field in (
        ({"prompt": "a", "min_p": 0.1}, "min_p"), ({"prompt": {}}, "prompt"), ({"text": "a", "stream": True}, "stream"),
        ({"input_ids": []}, "input_ids"), ({"sampling_params": {}}, "input_ids"), ({}, "prompt"),
        ({"input_ids": [99999], "sampling_params": {}}, "prompt"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    ):  # fmt: skip
        answer = random_model.post("/generate", body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, field), answer.text


def test_text_that_goes_on_from_text_keeps_the_sampled_ids(random_model: Gateway) -> None:
    """A text cut inside of a character does not come back to its ids by a second tokenisation."""
    with random_model.openai() as client:
        text, session = "once upon a time", ""
        for seed in range(4):
            answer: Any = client.completions.create(model=MODEL, prompt=text, max_tokens=20, seed=seed)
            text += answer.choices[0].text + " and"
            session = answer.session_id
    assert random_model.check(session) == [["0-1-2-3"]]


@pytest.mark.parametrize(
    ("said_again", "kept", "context"),
    [
        ("one STOP two", 4, " two"),  # without the end of turn: what stops it is not in the ids that are kept
        ("one <|end|> two", 5, " two"),
    ],
)
def test_an_end_of_turn_is_kept_where_the_client_says_it_again(
    said: Gateway, said_again: str, kept: int, context: str
) -> None:
    script(said, "one ", "x")
    session = said.open()
    prompt = "count: "
    said.post(f"/sessions/{session}/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 9})
    again = prompt + said_again.replace("STOP", "")
    said.post(f"/sessions/{session}/v1/completions", {"model": MODEL, "prompt": again, "max_tokens": 9})
    second = said.shown(session)["turns"][1]
    assert (second["kept"], said.renderer.decode(second["context"]).strip()) == (kept, context.strip())
    assert said.check(session) == [["0-1"]]


@pytest.mark.parametrize(("again", "kept"), [("one STOP two", 8), ("one  two", 4)])
def test_a_stop_string_in_text_is_kept_where_the_client_says_it_again(said: Gateway, again: str, kept: int) -> None:
    script(said, "one STOP and more", "x")
    session = said.open()
    body = {"model": MODEL, "prompt": "count: ", "max_tokens": 20, "stop": ["STOP"]}
    answer = said.post(f"/sessions/{session}/v1/completions", body)
    assert answer.json()["choices"][0]["text"] == "one "
    body["prompt"] = "count: " + again
    said.post(f"/sessions/{session}/v1/completions", body)
    second = said.shown(session)["turns"][1]
    assert said.renderer.decode(said.engine.log[1][0]) == "count: " + again
    assert second["kept"] == kept
    assert said.check(session) == [["0-1"]]


def test_plain_curl(random_model: Gateway) -> None:
    import shutil
    import subprocess

    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    session = random_model.open()
    body = json.dumps({"model": MODEL, "messages": [user("hi")], "max_tokens": 5})
    command = ["curl", "-sS", f"{random_model.url}/sessions/{session}/v1/chat/completions", "-d", body,
               "-H", f"Authorization: Bearer {random_model.token}", "-H", "Content-Type: application/json"]  # fmt: skip
    told = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=20).stdout)
    assert told["session_id"] == session
    assert random_model.check(session) == [["0"]]


@pytest.mark.parametrize("id", [2**31, 2**70, -(2**31) - 1])
def test_an_id_that_no_model_has_is_refused(random_model: Gateway, id: int) -> None:
    for path, body in (
        ("/v1/completions", {"model": MODEL, "prompt": [1, id]}),
        ("/generate", {"prompt": {"prompt_token_ids": [1, id]}}),
        ("/generate", {"input_ids": [1, id]}),
    ):
        answer = random_model.post(path, body)
        assert answer.status_code == (400 if path.startswith("/v1/") else 422), (path, answer.text)
        assert "token id" in answer.json()["error"]["message"]
