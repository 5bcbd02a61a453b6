"""What random text cannot show: exact wording, several versions, slow answers, failing engines, hang-ups."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from served import MODEL, Served, hang_up, wait_until

HI = [{"role": "user", "content": "hi"}]


def ask(served: Served, script: str, **options: Any) -> Any:
    served.engine.script = script
    with served.openai() as client:
        return client.chat.completions.create(model=MODEL, messages=HI, **options)  # pyright: ignore


def stream(served: Served, script: str, **options: Any) -> list[Any]:
    served.engine.script = script
    with served.openai() as client:
        return list(client.chat.completions.create(model=MODEL, messages=HI, stream=True, **options))  # pyright: ignore


def texts(chunks: list[Any]) -> list[str]:
    return [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]


def test_characters_come_whole_though_their_bytes_are_tokens(scripted: Served) -> None:
    said = "né🦊 — 漢字 👩‍👩‍👧!"
    assert ask(scripted, said).choices[0].message.content == said
    assert texts(stream(scripted, said)) == list(said)


def test_an_event_is_one_line_for_whoever_breaks_lines_as_python_does(scripted: Served) -> None:
    scripted.engine.script = said = "a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029z"
    body = {"model": MODEL, "messages": HI, "stream": True}
    with scripted.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == said


def test_a_replacement_character_that_was_meant_is_kept(scripted: Served) -> None:
    assert "".join(texts(stream(scripted, "a\ufffdb\ufffd"))) == "a\ufffdb\ufffd"


@pytest.mark.parametrize(
    ("script", "stop", "shown", "num_tokens"),
    [
        ("one STOP two", "STOP", "one ", 8),
        ("one STO two", "STOP", "one STO two", 12),  # 11 bytes and the end of turn
        ("one ST", ["STOP"], "one ST", 7),
        ("aaab", ["aab"], "a", 4),
        ("x€y", ["€"], "x", 4),
        ("ab", ["b", "ab"], "", 2),
    ],
)  # fmt: skip
def test_a_stop_string_is_cut_and_never_shown(
    scripted: Served, script: str, stop: Any, shown: str, num_tokens: int
) -> None:
    extra = {"return_token_ids": True}
    choice = ask(scripted, script, stop=stop, extra_body=extra).choices[0]
    parts = [part.choices[0] for part in stream(scripted, script, stop=stop, extra_body=extra)]
    assert choice.message.content == "".join(part.delta.content for part in parts) == shown
    assert len(choice.token_ids) == sum(len(part.token_ids) for part in parts) == num_tokens
    assert choice.finish_reason == parts[-1].finish_reason == "stop"


def test_length_is_reported_and_every_held_back_letter_delivered(scripted: Served) -> None:
    chunks = stream(scripted, "one STOP", stop="STOP", max_tokens=6)
    assert "".join(texts(chunks)) == "one ST"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_versions_are_told_by_span_and_by_chunk(scripted: Served) -> None:
    scripted.engine.flip = 2
    answer = ask(scripted, "abcd")
    assert answer.weight_version == 4
    assert answer.choices[0].weight_versions == [[3, 2], [4, 3]]
    chunks = stream(scripted, "abcd")
    assert [chunk.weight_version for chunk in chunks] == [3, 3, 3, 4, 4, 4]  # the opening, a, b, c, d, the end
    assert chunks[-1].choices[0].weight_versions == [[3, 2], [4, 3]]


def test_offsets_point_into_the_text(scripted: Served) -> None:
    scripted.engine.script = "né🦊!"
    with scripted.openai() as client:
        logprobs = client.completions.create(model=MODEL, prompt="x", logprobs=0).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0, 1, 1, 2, 2, 2, 2, 3, 4]
    assert logprobs.token_logprobs == pytest.approx([-0.1 * (i + 1) for i in range(9)])


def test_the_clients_own_accumulator_understands_the_stream(scripted: Served) -> None:
    scripted.engine.script = "grüße"
    with scripted.openai() as client:
        with client.chat.completions.stream(model=MODEL, messages=HI, n=2, logprobs=True) as events:  # pyright: ignore
            final = events.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["grüße", "grüße"]


def test_a_hang_up_cancels_every_sample(scripted: Served) -> None:
    scripted.engine.script, scripted.engine.pause_s = "x" * 200, 0.02
    body = {"model": MODEL, "messages": HI, "n": 3}
    before = counted_cancelled(scripted)
    hang_up(scripted.url, scripted.token, "/v1/chat/completions", body, when=lambda: scripted.engine.running == 3)
    wait_until(lambda: scripted.engine.cancelled == 3)
    with scripted.http() as client:
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            lines = answer.iter_lines()  # by name: dropping the iterator would close the connection
            next(lines)
            wait_until(lambda: scripted.engine.running == 3)
    wait_until(lambda: scripted.engine.cancelled == 6)
    wait_until(lambda: counted_cancelled(scripted) == before + 6)


def counted_cancelled(scripted: Served) -> float:
    """In the books of the server, which is every test's."""
    with scripted.http() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("tandem_samples_cancelled_total "))


def test_a_failing_engine_is_503_before_and_an_error_event_after_the_first_token(scripted: Served) -> None:
    scripted.engine.error_after = 2
    with pytest.raises(openai.InternalServerError) as status:
        ask(scripted, "abcd", n=2)
    assert status.value.status_code == 503
    assert status.value.code == "engine"
    with pytest.raises(openai.APIError, match="the script says so"):
        stream(scripted, "abcd")


def test_more_samples_than_allowed_are_told_to_wait(scripted: Served) -> None:
    scripted.engine.script, scripted.engine.waits_at = "x" * 100, 1
    body = {"model": MODEL, "messages": HI, "n": 41, "stream": True}
    with scripted.http() as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()  # by name: dropping the iterator would close the connection
            next(lines)
            wait_until(lambda: scripted.engine.running == 41)
            refused = scripted.post(body)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "busy"
    too_many = scripted.post({"model": MODEL, "prompt": ["a"] * 41, "n": 2}, path="/v1/completions")
    assert (too_many.status_code, too_many.json()["error"]["field"]) == (400, "n")


def test_an_event_stream_ends_with_done_and_says_so_in_its_type(scripted: Served) -> None:
    scripted.engine.script = "hü"
    answer = scripted.post({"model": MODEL, "messages": HI, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk" for line in lines[:-1])


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tool_calls_are_told_apart_whole_and_in_a_stream(scripted: Served) -> None:
    first, second = '{"name": "add", "arguments": {"a": "né"}}', '{"name": "now"}'
    said = f"Let me see.\n<tool_call>{first}</tool_call>\n<tool_call>{second}</tool_call>"
    choice = ask(scripted, said, tools=[ADD]).choices[0]
    chunks = stream(scripted, said, tools=[ADD])
    calls = [call for chunk in chunks for part in chunk.choices for call in part.delta.tool_calls or []]
    wanted = [("add", '{"a": "né"}'), ("now", "{}")]
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == wanted
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (index, *call) for index, call in enumerate(wanted)
    ]
    assert len({call.id for call in (*calls, *choice.message.tool_calls)}) == 4
    assert choice.message.content == "".join(texts(chunks)) == "Let me see."
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
    for kept in (ask(scripted, said), ask(scripted, said, tools=[ADD], tool_choice="none")):
        assert kept.choices[0].message.content == said
        assert kept.choices[0].message.tool_calls is None
        assert kept.choices[0].finish_reason == "stop"
