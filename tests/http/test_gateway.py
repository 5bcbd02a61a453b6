"""Agents through the gateway: recorded ids equal the engine's own log of prompts and samples."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_served import Gateway, Says, gateway_serving
from served import MODEL

from tandem.text.renderer import Renderer


@pytest.fixture(scope="module")
def _gateway(make_engine: Any, renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway_serving(make_engine(), renderer, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.fixture
def gateway(_gateway: Gateway) -> Gateway:
    """The embedded engine on a random model: its turns are cut by length and full of invalid text, so whoever tokenises
    them again gets other ids."""
    _gateway.engine.log.clear()
    return _gateway


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_the_model_s_text_does_not_survive_a_second_tokenisation(gateway: Gateway) -> None:
    """What the other tests stand upon."""
    gateway.say([user("hi")], seed=1, max_tokens=30)
    ((_, completion),) = gateway.engine.log
    assert gateway.renderer.encode(gateway.renderer.decode(completion.ids)) != completion.ids


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_the_openai_client_s_turns_are_recorded_as_the_engine_saw_them(gateway: Gateway, turns: int) -> None:
    session = gateway.open(task_id="greet")
    messages: list[Any] = [{"role": "system", "content": "be brief"}]
    with gateway.openai(session) as client:
        for number in range(turns):
            messages.append(user(f"question {number}, grüße 🦊"))
            answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=25, seed=number)
            messages.append(answer.choices[0].message)
    shown = gateway.shown(session)
    assert [turn["told"]["content"] for turn in shown["turns"]] == [
        m.content for m in messages if hasattr(m, "content")
    ]
    assert gateway.check(session) == [["-".join(map(str, range(turns)))]]
    (row,) = gateway.delivered(session)
    assert (row["task_id"], row["reward"], row["status"]) == ("greet", 1.0, "truncated")
    assert [message["role"] for message in row["messages"]] == ["system", *["user", "assistant"] * turns]


@pytest.mark.parametrize("named", ["by path", "by header", "not at all"])
def test_a_stream_is_recorded_before_its_last_chunk(gateway: Gateway, named: str) -> None:
    session = "" if named == "not at all" else gateway.open()
    headers = {"X-Tandem-Session": session} if named == "by header" else {}
    messages: list[Any] = []
    with gateway.openai(session if named == "by path" else "", default_headers=headers) as client:
        for number in range(3):
            messages.append(user(f"question {number}"))
            text = ""
            with client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, stream=True) as chunks:
                for chunk in chunks:
                    text += chunk.choices[0].delta.content or ""
                    session = chunk.session_id  # pyright: ignore
            messages.append({"role": "assistant", "content": text})
    assert gateway.check(session) == [["0-1-2"]]


def test_the_async_client_s_parallel_samples_are_branches(gateway: Gateway) -> None:
    session = gateway.open()
    opening = [user("one of many")]

    async def branch(client: openai.AsyncOpenAI, number: int) -> None:
        messages: list[Any] = list(opening)
        for turn in range(3):
            answer = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=12, seed=100 * number + turn
            )
            messages += [answer.choices[0].message, user(f"{number}, {turn}")]

    async def all_of_them() -> None:
        base = f"{gateway.url}/sessions/{session}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=gateway.token, max_retries=0) as client:
            await asyncio.gather(*(branch(client, number) for number in range(4)))

    asyncio.run(all_of_them())
    ((*paths,),) = gateway.check(session)
    assert len(paths) == 4
    assert all(path.count("-") == 2 for path in paths)


def test_conversations_without_a_session_get_one_each(gateway: Gateway) -> None:
    """Threads at once, with one system prompt: none goes on from another's turn."""
    sessions: dict[int, set[str]] = {}

    def talk(number: int) -> None:
        messages: list[Any] = [{"role": "system", "content": "all alike"}, user("same question")]
        for turn in range(3):
            answer = gateway.chat(messages, max_tokens=15)
            sessions.setdefault(number, set()).add(answer["session_id"])
            messages += [answer["choices"][0]["message"], user(f"{number} {turn}")]

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(ids) == 1 for ids in sessions.values())
    ids = [each for ids in sessions.values() for each in ids]
    assert len(set(ids)) == 4
    assert gateway.check(*ids) == [["0-1-2"]] * 4


def test_edits_of_history_branch_from_the_last_common_turn(gateway: Gateway) -> None:
    session = gateway.open()
    messages: list[Any] = []
    for number in range(3):
        messages.append(user(f"question {number}"))
        messages.append(gateway.say(messages, session, max_tokens=15))
    edited_question = [*messages[:4], user("another question 2")]
    gateway.say(edited_question, session, max_tokens=15)  # turn 3, after turn 1
    gateway.say(messages[:3], session, max_tokens=15)  # turn 4, after turn 0: asked again
    edited_answer = [*messages[:3], {"role": "assistant", "content": "I never said that"}, user("go on")]
    gateway.say(edited_answer, session, max_tokens=15)  # turn 5, after turn 0
    gateway.say([user("something else")], session, max_tokens=15)  # turn 6: a root
    gateway.say([{"role": "system", "content": "new"}, *messages], session, max_tokens=15)  # turn 7: a root
    context = gateway.renderer.decode(gateway.shown(session)["turns"][5]["context"], skip_special=False)
    after = "<|user|>question 1<|end|><|assistant|>I never said that<|end|><|user|>go on<|end|><|assistant|>"
    assert context.removeprefix("<|end|>") == after
    assert gateway.check(session) == [["0-1-2", "0-1-3", "0-4", "0-5", "6", "7"]]


def test_samples_of_one_request_are_branches_that_go_on_apart(gateway: Gateway) -> None:
    session = gateway.open()
    opening = [user("two answers")]
    answer = gateway.chat(opening, session, n=2, seed=5, max_tokens=15)
    first, second = (choice["message"] for choice in answer["choices"])
    assert first["content"] != second["content"]
    gateway.say([*opening, second, user("go on")], session, max_tokens=15)
    gateway.say([*opening, first, user("go on")], session, max_tokens=15)
    turns = [turn["id"] for turn in gateway.shown(session)["turns"]]
    assert sorted(choice["turn_id"] for choice in answer["choices"]) == sorted(turns[:2])
    by_index = [turns.index(choice["turn_id"]) for choice in answer["choices"]]
    assert gateway.check(session) == [sorted([f"{by_index[1]}-2", f"{by_index[0]}-3"])]


def test_a_stop_string_stays_in_the_recorded_ids(gateway: Gateway) -> None:
    session = gateway.open()
    free = gateway.say([user("count")], max_tokens=60, seed=1)["content"]
    stop = next(letter for letter in free[5:] if letter.isalpha() and letter.isascii())
    gateway.engine.log.clear()
    messages = [user("count")]
    answer = gateway.chat(messages, session, max_tokens=60, seed=1, stop=[stop])
    message = answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert stop not in message["content"]
    gateway.say([*messages, message, user("again")], session, max_tokens=10)
    (first, second) = gateway.shown(session)["turns"]
    assert gateway.renderer.decode(first["ids"]).endswith(stop)
    assert gateway.renderer.decode(second["context"], skip_special=False).startswith("<|end|><|user|>")
    assert gateway.check(session) == [["0-1"]]


def test_a_client_that_hangs_up_leaves_no_turn(gateway: Gateway) -> None:
    session = gateway.open()
    body = {"model": MODEL, "messages": [user("a long story")], "stream": True, "max_tokens": 900}
    with gateway.client.stream("POST", f"/sessions/{session}/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    gateway.say([user("a short one")], session, max_tokens=5)
    gateway.engine.log[:] = gateway.engine.log[-1:]  # the other one may have ended before it was cancelled
    (turn,) = gateway.shown(session)["turns"]
    assert turn["said"] == [user("a short one")]


def test_content_in_parts_and_thoughts_left_out_are_the_same_history(renderer: Renderer, tmp_path: Path) -> None:
    from gateway_served import Says

    from tandem.text.tokenizer import byte_tokenizer

    thinking = Renderer(byte_tokenizer(), thinking=True)
    engine = Says(thinking, "carry the one</think>\n12", "the same</think>\nyes", "no</think>\nno")
    with gateway_serving(engine, thinking, tmp_path) as gateway:
        session = gateway.open()
        first = gateway.say([user("5 + 7")], session)
        assert (first["content"], first["reasoning_content"]) == ("12", "carry the one")
        without = {"role": "assistant", "content": [{"type": "text", "text": "12"}]}
        second = gateway.say([user("5 + 7"), without, user("sure?")], session)
        with_thought = [user("5 + 7"), first, user("sure?"), second, user("really?")]
        gateway.say(with_thought, session)
        other_thought = [user("5 + 7"), {**first, "reasoning_content": "I guessed"}, user("sure?")]
        gateway.say(other_thought, session)
        turns = gateway.shown(session)["turns"]
        assert "carry the one</think>" in thinking.decode(turns[0]["ids"], skip_special=False)
        assert gateway.check(session) == [["0-1-2", "3"]]
        row = gateway.delivered(session)[0]
        assert row["thinking_tokens"] == sum(turn["thought"][0] for turn in turns[:3])


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_object"}}, {"logit_bias": {"5": 1}}, {"min_p": 0.5},
        {"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "high"},
    ],
)  # fmt: skip
def test_a_gateway_records_no_answer_that_a_trainer_could_not_follow(gateway: Gateway, options: Any) -> None:
    (name,) = options
    refused = gateway.post("/v1/chat/completions", {"model": MODEL, "messages": [user("hi")]} | options)
    told = refused.json()["error"]
    assert (refused.status_code, told["param"]) == (400, name)
    assert "record" in told["message"]


def test_responses_of_one_conversation_are_turns_of_one_branch(renderer: Renderer, tmp_path: Path) -> None:
    """The client sends its items back as they came: a text, a call, and then the call's answer."""
    tools: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
    says = Says(renderer, 'So. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    with gateway_serving(says, renderer, tmp_path) as gateway:
        session = gateway.open()
        with gateway.openai(session) as client:
            first = client.responses.create(model=MODEL, input="1 + 1", tools=tools)
            called: Any = first.output[-1]
            answer = {"type": "function_call_output", "call_id": called.call_id, "output": "2"}
            items: Any = [{"role": "user", "content": "1 + 1"}, *first.output, answer]
            client.responses.create(model=MODEL, input=items, tools=tools)
        first_turn, second = gateway.shown(session)["turns"]
        assert (first_turn["parent"], second["parent"]) == (None, first_turn["id"])
        assert gateway.check(session) == [["0-1"]]
