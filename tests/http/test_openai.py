"""The real openai client against the real embedded engine."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from served import CONTEXT, MODEL, Served

from tandem.types import Completion, Sampling

SAY = [{"role": "user", "content": "Say something, grüße 🦊"}]


def direct(make_engine: Any, prompt: list[int], *samplings: Sampling) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        engine = make_engine()
        try:
            return await asyncio.gather(*(engine.generate(prompt, sampling) for sampling in samplings))
        finally:
            await engine.close()

    return asyncio.run(all_of_them())


def chat(served: Served, **options: Any) -> Any:
    with served.openai() as client:
        return client.chat.completions.create(model=MODEL, messages=SAY, **options)  # pyright: ignore


def stream_chat(served: Served, **options: Any) -> list[Any]:
    with served.openai() as client:
        return list(client.chat.completions.create(model=MODEL, messages=SAY, stream=True, **options))  # pyright: ignore


def test_the_model_is_listed_and_found(served: Served) -> None:
    with served.openai() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).to_dict()["weight_version"] == 7
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("other")
    assert caught.value.body["code"] == "model_not_found"  # pyright: ignore


def test_greedy_over_http_is_greedy_in_the_engine(served: Served, make_engine: Any) -> None:
    answer = chat(served, temperature=0, max_tokens=40, logprobs=True, extra_body={"return_token_ids": True})
    prompt = served.renderer.prompt(SAY)
    (expected,) = direct(make_engine, prompt, Sampling(max_tokens=40, temperature=0))
    choice = answer.choices[0]
    assert answer.prompt_token_ids == prompt
    assert choice.token_ids == expected.ids
    assert choice.message.content == served.renderer.visible(expected.ids)
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(expected.logprobs, abs=1e-4)
    assert choice.finish_reason == expected.finish_reason
    assert (answer.weight_version, choice.weight_versions) == (7, [[7, len(expected.ids)]])
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(expected.ids))
    assert usage.total_tokens == len(prompt) + len(expected.ids)


def test_sample_i_of_n_is_drawn_with_seed_plus_i(served: Served, make_engine: Any) -> None:
    asked = {"n": 3, "seed": 11, "temperature": 0.9, "top_p": 0.95, "max_tokens": 12}
    answer = chat(served, **asked, extra_body={"return_token_ids": True, "top_k": 50})
    samplings = [Sampling(12, temperature=0.9, top_p=0.95, top_k=50, seed=seed) for seed in (11, 12, 13)]
    expected = direct(make_engine, served.renderer.prompt(SAY), *samplings)
    assert [choice.token_ids for choice in answer.choices] == [completion.ids for completion in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3


def test_without_a_seed_answers_differ(served: Served) -> None:
    one, other = (chat(served, max_tokens=24).choices[0].message.content for _ in range(2))
    assert one != other


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_says_what_the_whole_answer_says(served: Served, seed: int) -> None:
    """A random model makes invalid and split UTF-8 all the time: the hardest text there is."""
    asked: dict[str, Any] = {"n": 2, "seed": seed, "max_tokens": 60, "logprobs": True, "stop": ["e", "\ufffd\ufffd!"]}
    extra = {"return_token_ids": True}
    whole = chat(served, **asked, extra_body=extra)
    chunks = stream_chat(served, **asked, extra_body=extra, stream_options={"include_usage": True})
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.weight_version for chunk in chunks} == {7}
    for expected in whole.choices:
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == expected.index]
        assert "".join(part.delta.content for part in parts) == expected.message.content
        assert [token_id for part in parts for token_id in part.token_ids] == expected.token_ids
        entries = [entry for part in parts for entry in part.logprobs.content]
        assert [entry.bytes for entry in entries] == [entry.bytes for entry in expected.logprobs.content]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]
        assert parts[-1].weight_versions == expected.weight_versions


def test_logprob_bytes_are_the_text(served: Served) -> None:
    choice = chat(served, seed=1, max_tokens=30, logprobs=True).choices[0]
    raw = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert raw.decode("utf-8", "replace").removesuffix("<|end|>") == choice.message.content


@pytest.mark.parametrize("stream", [False, True])
def test_an_id_to_stop_at_ends_the_answer_and_is_not_in_its_text(
    served: Served, make_engine: Any, stream: bool
) -> None:
    ids = served.renderer.encode("once upon")
    (whole,) = direct(make_engine, ids, Sampling(max_tokens=30, temperature=0))
    stop_id = whole.ids[6]
    expected = whole.ids[: whole.ids.index(stop_id) + 1]
    extra = {"return_token_ids": True, "stop_token_ids": [5, stop_id]}
    with served.openai() as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": ids, "temperature": 0, "max_tokens": 30, "extra_body": extra}
        made = client.completions.create(**asked, stream=stream)
        choices = [choice for part in (made if stream else [made]) for choice in part.choices]
    assert [token_id for choice in choices for token_id in choice.token_ids] == expected
    assert choices[-1].finish_reason == "stop"
    assert "".join(choice.text for choice in choices) == served.renderer.decode(expected[:-1])
    refused = served.post({"model": MODEL, "prompt": ids, "stop_token_ids": [-1]}, "/v1/completions")
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "stop_token_ids.0")


def test_completions_take_text_ids_and_lists(served: Served, make_engine: Any) -> None:
    ids = served.renderer.encode("once upon")
    with served.openai() as client:

        def ask(prompt: Any, **options: Any) -> Any:
            extra = {"return_token_ids": True}
            return client.completions.create(model=MODEL, prompt=prompt, temperature=0, extra_body=extra, **options)

        answers = [ask("once upon"), ask(ids)]
        several = ask(["once upon", "a time"], n=2)
        listed = ask([ids])
    (expected,) = direct(make_engine, ids, Sampling(max_tokens=16, temperature=0))
    assert [answer.choices[0].token_ids for answer in answers] == [expected.ids, expected.ids]
    assert [answer.prompt_token_ids for answer in answers] == [ids, ids]
    assert listed.prompt_token_ids == [ids]
    assert several.prompt_token_ids == [ids, served.renderer.encode("a time")]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].token_ids == several.choices[1].token_ids == expected.ids
    assert several.choices[2].token_ids != expected.ids


def test_completion_logprobs_and_offsets_stream_alike(served: Served) -> None:
    with served.openai() as client:
        options: dict[str, Any] = {"model": MODEL, "prompt": "x", "seed": 3, "max_tokens": 40, "logprobs": 1}
        whole = client.completions.create(**options).choices[0]
        parts = [choice for chunk in client.completions.create(**options, stream=True) for choice in chunk.choices]
    assert "".join(part.text for part in parts) == whole.text
    assert whole.logprobs is not None
    for key in ("tokens", "token_logprobs", "text_offset"):
        joined = [entry for part in parts for entry in getattr(part.logprobs, key)]
        assert joined == getattr(whole.logprobs, key)
        assert len(joined) == 40


def test_max_tokens_defaults_to_the_rest_of_the_context(served: Served) -> None:
    answer = chat(served, temperature=0)
    assert answer.usage.total_tokens == CONTEXT or answer.choices[0].finish_reason == "stop"


def test_hang_ups_leave_the_engine_working(served: Served) -> None:
    with served.http() as client:
        body = {"model": MODEL, "messages": SAY, "stream": True, "n": 2, "seed": 0}
        for _ in range(3):
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                next(answer.iter_lines())
    assert chat(served, max_tokens=3, seed=1).usage.completion_tokens == 3


def test_a_prompt_that_leaves_no_room_is_refused_by_name(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(served, max_tokens=CONTEXT)
    assert caught.value.body["field"] == "max_tokens"  # pyright: ignore
    for prompt in ([1] * CONTEXT, "x" * (CONTEXT + 1), "x" * 2**17):
        with served.openai() as client, pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        assert (caught.value.param, caught.value.body["field"]) == ("prompt", "prompt")  # pyright: ignore
        assert (caught.value.type, caught.value.code) == ("invalid_request_error", "context_length_exceeded")
    with served.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[1, 100_000], max_tokens=1)
    assert caught.value.body["field"] == "prompt"  # pyright: ignore


def test_a_chat_that_names_no_limit_gets_so_many_tokens_and_no_more(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.http() as client:
        assert client.get("/limits").json()["default_tokens"] == 4096
    monkeypatch.setattr("tandem.serve.openai.routes.DEFAULT_TOKENS", 7)
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "seed": 1}
    told = served.post(body).json()
    assert (told["usage"]["completion_tokens"], told["choices"][0]["finish_reason"]) == (7, "length")
    told = served.post(body | {"max_tokens": 9}).json()
    assert told["usage"]["completion_tokens"] == 9
