"""A remote server as an engine: what it says is taken at its word only where that adds up."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from served import MODEL, Served, wait_until
from vllm_script import BASE, KEY, Running, running

from stopwatch import Stopwatch
from tandem.engine.remote.engine import RemoteEngine
from tandem.errors import EngineError, EngineLost, EngineSilent, SpecError
from tandem.types import Completion, Sampling, Span

THREE = Sampling(max_tokens=3)


def play(engine: RemoteEngine, scenario: Callable[[], Awaitable[Any]]) -> Any:
    """To its end; nothing is left behind."""

    async def go() -> Any:
        try:
            result = await asyncio.wait_for(scenario(), 60)
        finally:
            await engine.close()
        await asyncio.sleep(0.02)  # connections are closed by the loop
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return asyncio.run(go())


def engine_at(server: Running, **options: Any) -> RemoteEngine:
    return RemoteEngine(server.url, BASE, **{"poll_s": 0.02, "deadline_s": 20.0, "patience_s": 0.2} | options)


def ask(engine: RemoteEngine, sampling: Sampling = THREE, **options: Any) -> Completion:
    return play(engine, lambda: engine.generate([1, 2], sampling, **options))


def refusal(engine: RemoteEngine, kind: type[EngineError], match: str, sampling: Sampling = THREE) -> str:
    with pytest.raises(kind, match=match) as caught:
        ask(engine, sampling)
    assert kind is not EngineError or not isinstance(caught.value, EngineLost | EngineSilent)
    return str(caught.value)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


# --- our own server


@pytest.fixture
def key_file(served: Served, tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text(served.token + "\n")
    return str(path)


def ours(served: Served, **options: Any) -> RemoteEngine:
    return RemoteEngine(f"{served.url}/v1", MODEL, **options)


SETTINGS = {
    "plain": Sampling(max_tokens=30, seed=5),
    "all three": Sampling(max_tokens=30, temperature=0.7, top_p=0.9, top_k=40, seed=2**60 + 1),
    "greedy": Sampling(max_tokens=30, temperature=0.0, top_k=3, top_p=0.5),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_our_own_server_gives_the_engine_s_very_tokens(
    served: Served, make_engine: Any, key_file: str, setting: str
) -> None:
    sampling, heard = SETTINGS[setting], []
    seed = sampling.seed % 2**53

    async def direct() -> Completion:
        local = make_engine()
        try:
            plain = {name: getattr(sampling, name) for name in Sampling.__slots__} | {"seed": seed}
            return await local.generate([1, 2, 3], Sampling(**plain))
        finally:
            await local.close()

    engine = ours(served, key_file=key_file)
    found = play(engine, lambda: engine.generate([1, 2, 3], sampling, on_token=lambda *token: heard.append(token)))
    expected = asyncio.run(direct())
    assert (found.ids, found.finish_reason, found.spans) == (expected.ids, expected.finish_reason, expected.spans)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert heard == list(zip(found.ids, found.logprobs, found.versions, strict=True))


def test_the_versions_are_the_server_s_and_tokens_are_told_as_they_come(scripted: Served, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(scripted.token)
    scripted.engine.script, scripted.engine.flip, scripted.engine.waits_at = "abcdef", 4, 2
    engine, heard = ours(scripted, key_file=str(tmp_path / "key")), []

    def hear(*token: Any) -> None:
        heard.append(token)
        scripted.engine.waits_at = -1  # it would wait for ever for one who hears of all at the end

    completion = play(engine, lambda: engine.generate([1], Sampling(99), on_token=hear))
    assert completion.spans == [Span(3, 4), Span(4, 3)]
    assert [version for _, _, version in heard] == [3, 3, 3, 3, 4, 4, 4]


def test_who_hangs_up_ends_the_sample(scripted: Served, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(scripted.token)
    scripted.engine.script, scripted.engine.pause_s = "x" * 100, 0.02
    engine = ours(scripted, key_file=str(tmp_path / "key"))

    async def scenario() -> None:
        task = asyncio.create_task(engine.generate([1], Sampling(max_tokens=90)))
        await until(lambda: scripted.engine.running)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await until(lambda: scripted.engine.cancelled)

    play(engine, scenario)


def test_closing_ends_who_waits(scripted: Served, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(scripted.token)
    scripted.engine.script, scripted.engine.pause_s = "x" * 100, 0.05
    engine = ours(scripted, key_file=str(tmp_path / "key"))

    async def scenario() -> None:
        task = asyncio.create_task(engine.generate([1], Sampling(max_tokens=90)))
        await until(lambda: scripted.engine.running)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(task, 10)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1], Sampling())

    play(engine, scenario)


def test_closing_ends_its_own_questions_too_and_no_engine_is_called_lost() -> None:
    """What it asks before a first request, to see which logprobs come, is cut by nobody else."""
    begun = threading.Event()

    def hang(body: Any, events: list[Any]) -> list[Any]:
        begun.set()
        server.script.hang.set()
        return events

    with running(events=hang) as server:
        engine = engine_at(server)

        async def scenario() -> None:
            task = asyncio.create_task(engine.generate([1], Sampling(max_tokens=3, temperature=0.7)))
            await until(begun.is_set)
            await engine.close()
            with pytest.raises(EngineError, match="engine: closed") as caught:
                await asyncio.wait_for(task, 10)
            assert type(caught.value) is EngineError

        play(engine, scenario)


def test_a_busy_server_is_asked_again_until_it_has_room(scripted: Served, tmp_path: Path) -> None:
    """It takes 80 samples at a time, and answers 429 to more."""
    (tmp_path / "key").write_text(scripted.token)
    scripted.engine.script, scripted.engine.pause_s = "abc", 0.1
    engine = ours(scripted, key_file=str(tmp_path / "key"))
    completions = play(engine, lambda: asyncio.gather(*(engine.generate([1], Sampling(99)) for _ in range(100))))
    assert [len(completion.ids) for completion in completions] == [4] * 100


def test_an_error_in_the_middle_of_a_stream_is_the_engine_s(scripted: Served, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(scripted.token)
    scripted.engine.script, scripted.engine.error_after = "abcdef", 3
    refusal(ours(scripted, key_file=str(tmp_path / "key")), EngineError, "the script says so", Sampling(99))


def test_what_the_server_refuses_is_said_with_its_reason(served: Served, key_file: str) -> None:
    refusal(ours(served, key_file=key_file), EngineError, "400.*exceed the context of 256", Sampling(max_tokens=300))
    other = RemoteEngine(f"{served.url}/v1", "other", key_file=key_file)
    refusal(other, EngineError, r"there is no model 'other' \(engine.model\); it has 'test/tiny'")
    engine = ours(served, key_file=key_file)
    with pytest.raises(EngineError, match="empty prompt"):
        play(engine, lambda: engine.generate([], THREE))


# --- the key


def test_the_key_goes_to_the_server_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("THE_KEY", KEY)
    (tmp_path / "key").write_text(KEY + "\n")
    with running() as server:
        for options in ({"key_env": "THE_KEY"}, {"key_file": str(tmp_path / "key")}):
            engine = engine_at(server, **options)
            parts = "".join(repr(vars(each)) for each in vars(engine).values() if hasattr(each, "__dict__"))
            assert KEY not in repr(engine) + repr(vars(engine)) + parts
            ask(engine)
            assert server.script.keys.pop() == f"Bearer {KEY}"
        server.script.status = 400
        told = refusal(engine_at(server, key_env="THE_KEY"), EngineError, r"you sent Bearer \(the key\)")
        assert KEY not in told
        ask_plain = engine_at(server)
        server.script.status = 200
        ask(ask_plain)
        assert server.script.keys.pop() == ""
    assert KEY not in caplog.text


def test_a_key_that_comes_back_in_what_is_no_http_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", KEY)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nX-You-Sent: Bearer " + KEY.encode() + b"\x00\r\n\r\n")
        await writer.drain()
        writer.close()

    async def scenario() -> str:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        engine = RemoteEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", BASE, key_env="THE_KEY")
        with pytest.raises(EngineLost, match=r"Bearer \(the key\)") as caught:
            await engine.generate([1], Sampling(max_tokens=1))
        await engine.close()
        server.close()
        return str(caught.value)

    told = asyncio.run(scenario())
    assert KEY not in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"key_env": "NOT_THERE_AT_ALL"}, "engine.key_env = 'NOT_THERE_AT_ALL': there is no such environment variable"),
        ({"key_file": "/nowhere/key"}, "engine.key_file = '/nowhere/key': there is no such file"),
        ({"key_env": "A", "key_file": "b"}, "both set"),
        ({"key_env": "BAD_KEY"}, "not a valid API key"),
        ({"on_update": "continue"}, "keeps the adapter that it began with; use 'finish' or 'restart'"),
        ({"slots": 1}, "must be 2 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAD_KEY", "sk\r\nX-Evil:1")
    with pytest.raises(SpecError, match=match) as caught:
        RemoteEngine("http://127.0.0.1:1/v1", BASE, **options)
    assert "Evil" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("ftp://host/v1", "must begin with http"),
        ("file:///v1", "must begin with http"),
        ("host:8000/v1", "must begin with http"),
        ("http:///v1", "must begin with http"),
        ("http://host:8000", "ends in /v1"),
        ("http://host/v1?x=1", "ends in /v1"),
        ("http://user:secret@host/v1", "user name or password"),
        ("http://host:port/v1", "not a URL"),
    ],
)
def test_a_url_that_cannot_be_is_refused(url: str, match: str) -> None:
    with pytest.raises(SpecError, match=match) as caught:
        RemoteEngine(url, BASE)
    assert "secret" not in str(caught.value)


# --- what it asks for


def test_vllm_is_asked_for_the_whole_distribution_and_nothing_is_left_to_its_defaults() -> None:
    with running() as server:
        sampling = Sampling(max_tokens=2, temperature=0.7, top_p=0.9, top_k=5, stop=("a",), stop_ids=(9,), seed=4)
        ask(engine_at(server, end_ids={3}), sampling)
        ask(engine_at(server), Sampling(max_tokens=2, temperature=0.0, top_p=0.9, top_k=5))
        asked, greedy = server.script.asked[1], server.script.asked[2]
    assert asked == {
        "model": BASE, "prompt": [1, 2], "max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 4,
        "stop": ["a"], "stop_token_ids": [3, 9], "stream": True, "logprobs": 0, "return_token_ids": True, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "skip_special_tokens": False,
    }  # fmt: skip
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"]) == (0.0, 1.0, 0)


def test_logprobs_of_before_the_temperature_are_refused_where_that_matters() -> None:
    with running(raw_logprobs=True) as server:
        for sampling in (THREE, Sampling(max_tokens=3, temperature=0.0, top_k=4)):
            ask(engine_at(server), sampling)
        for name, value in (("temperature", 0.7), ("top_p", 0.9), ("top_k", 5)):
            sampling = Sampling(**{"max_tokens": 3, name: value})
            refusal(engine_at(server), EngineError, "--logprobs-mode processed_logprobs", sampling)
        refusal(engine_at(server), EngineError, "at least 0.01", Sampling(max_tokens=3, temperature=0.001))
    with running() as server:
        engine = engine_at(server)
        hot = Sampling(max_tokens=3, temperature=1.5)
        play(engine, lambda: asyncio.gather(*(engine.generate([1], hot) for _ in range(8))))
        assert len(server.script.asked) == 8 + 1, "it is found out once"


# --- answers that do not add up


def broken(change: Callable[[dict[str, Any]], None], index: int = 1) -> Callable[[Any, list[Any]], Any]:
    """The choice of one event is changed."""

    def events(body: Any, events: list[Any]) -> list[Any]:
        change(events[index]["choices"][0])
        return events

    return events


def put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda choice: choice.update(values)


def lps(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"token_logprobs": list(values)}}


WRONG: dict[str, tuple[Callable[[Any, list[Any]], Any], str]] = {
    "no ids": (broken(lambda choice: choice.pop("token_ids")), "has no token_ids.*never tokenised again"),
    "ids are null": (broken(put(token_ids=None)), "has no token_ids"),
    "ids are text": (broken(put(token_ids=["token_id:11"])), "has no token_ids"),
    "ids are true": (broken(put(token_ids=[True])), "has no token_ids"),
    "ids are negative": (broken(put(token_ids=[-1])), "has no token_ids"),
    "no logprobs": (broken(put(logprobs=None)), "has no logprobs.token_logprobs"),
    "chat logprobs": (broken(put(logprobs={"content": []})), "has no logprobs.token_logprobs"),
    "more ids than logprobs": (broken(put(token_ids=[11, 12])), "2 token_ids come with 1 token_logprobs"),
    "more logprobs than ids": (broken(put(**lps(-1.0, -2.0))), "1 token_ids come with 2 token_logprobs"),
    "a logprob is NaN": (broken(put(**lps(math.nan))), "a token's logprob is nan"),
    "a logprob is null": (broken(put(**lps(None))), "a token's logprob is None"),
    "a logprob is minus infinity": (broken(put(**lps(-math.inf))), "a token's logprob is -inf"),
    "a logprob is text": (broken(put(**lps("-1"))), "a token's logprob is '-1'"),
    "a logprob is a probability": (broken(put(**lps(0.3))), r"a token's logprob is 0\.3"),
    "another prompt": (broken(put(prompt_token_ids=[0, 1, 2]), 0), "it answers another prompt"),
    "no finish": (broken(put(finish_reason=None), 2), "ended without a finish_reason"),
    "aborted": (broken(put(finish_reason="abort"), 2), "ended with 'abort'"),
    "tokens after the end": (broken(put(finish_reason="stop"), 0), "tokens come after the finish_reason"),
    "another choice": (broken(put(index=1)), "asked for one choice"),
    "no token at all": (
        lambda body, events: [{"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"}]}],
        "has no token",
    ),
    "too many tokens": (lambda body, events: [*events[:2], *events[:2]], "more than max_tokens = 3"),
    "choices are no list": (lambda body, events: [{"choices": {}}], "no list of choices"),
    "spans count too few": (broken(put(weight_versions=[[4, 2]]), 2), "weight_versions count 2 tokens, but 3 arrived"),
    "spans count too many": (broken(put(weight_versions=[[4, 2], [5, 3]]), 2), "did the answer restart"),
    "spans of no form": (broken(put(weight_versions=[4]), 2), "has an unknown form"),
    "spans with a gap": (
        broken(put(weight_versions=[_span("4", 0, 1), _span("5", 2, 3)]), 2) if (_span := lambda v, s, e: {
            "version": v, "start": s, "end": e}) else None,
        "has an unknown form",
    ),
    "weights without a number changed": (
        broken(put(weight_versions=[["default", 1], ["other", 2]]), 2),
        "changed in the middle, and their labels are not numbers: 'default', 'other'",
    ),
    "not JSON": (lambda body, events: b"data: {oops\n\n", "not a JSON object"),
    "a list": (lambda body, events: b"data: []\n\n", "not a JSON object"),
    "no stream": (lambda body, events: {"choices": []}, "asked for a stream, but the answer is 'application/json'"),
    "an endless line": (lambda body, events: b"data: " + b"x" * 5_000_000, "an event of more than 4194304 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_an_answer_that_does_not_add_up_is_an_error_with_a_name(wrong: str) -> None:
    events, match = WRONG[wrong]
    with running(events=events) as server:
        with Stopwatch() as watch:
            refusal(engine_at(server), EngineError, match)
        assert watch.seconds < 3


def test_answers_of_other_forms_that_do_add_up_are_taken() -> None:
    def one_event(body: Any, events: list[Any]) -> Any:
        """Carriage returns, comments, a greeting, several tokens at once, vLLM's spans, a chunk of usage."""
        tokens = {"token_ids": [10, 11, 12], "logprobs": {"token_logprobs": [-1, -1.5, 0.0]}}
        spans = [{"version": "4", "start": 0, "end": 2}, {"version": "6", "start": 2, "end": 3}]
        choice = {"index": 0, "text": "xyz", "finish_reason": "stop", "weight_versions": spans, **tokens}
        greeting = {"choices": [{"index": 0, "text": ""}]}
        sent = [greeting, {"choices": [choice]}, {"choices": [], "usage": {}}]
        lines = [f"data: {json.dumps(event)}\r\n\r\n" for event in sent]
        return (": ping\r\n\r\n" + "".join(lines) + "data:[DONE]\r\n\r\n").encode()

    with running(events=one_event) as server:
        completion = ask(engine_at(server))
    assert completion == Completion([10, 11, 12], [-1.0, -1.5, 0.0], [Span(4, 2), Span(6, 1)], "stop")


def test_weights_under_a_name_that_is_no_number_have_no_version() -> None:
    with running(events=broken(put(weight_versions=[["default", 3]]), 2)) as server:
        assert ask(engine_at(server)).spans == [Span(-1, 3)]
    with running() as server:
        assert ask(engine_at(server)).spans == [Span(-1, 3)]


# --- failures


def test_a_failure_of_a_server_that_lives_and_one_that_does_not_are_two_errors() -> None:
    with running(status=500) as server:
        refusal(engine_at(server), EngineError, "500 it failed")
        server.script.health = 503
        with pytest.raises(EngineLost, match="no longer healthy"):
            ask(engine_at(server))
        server.script.status = 200
        server.script.events = lambda body, events: [events[0], {"error": {"message": "EngineCore died"}}]
        with pytest.raises(EngineLost, match=r"EngineCore died.*no longer healthy"):
            ask(engine_at(server))
        server.script.health = 200
        refusal(engine_at(server), EngineError, "EngineCore died")


def test_redirects_are_not_followed() -> None:
    with running(status=307) as server:
        refusal(engine_at(server), EngineError, "status 307; redirects are not followed")


def test_a_server_that_is_not_there_is_lost_at_once() -> None:
    with running() as server:
        pass
    with Stopwatch() as watch, pytest.raises(EngineLost, match="Cannot connect"):
        ask(engine_at(server))
    assert watch.seconds < 2


def test_a_stream_that_breaks_off_is_a_lost_engine() -> None:
    def cut(body: Any, events: list[Any]) -> bytes:
        return f"data: {json.dumps(events[0])}\n\n".encode()

    with running(events=cut) as server:
        with pytest.raises(EngineLost, match="ended before its end mark"):
            ask(engine_at(server))


@pytest.mark.parametrize("after", [0, 1])
def test_a_server_that_says_nothing_any_more_is_silent_after_its_deadline(after: int) -> None:
    with running() as server:

        def hang(*token: Any) -> None:
            server.script.hang.set()

        if not after:
            hang()
        server.script.pause_s = 0.05
        engine = engine_at(server, deadline_s=0.4)
        with (
            Stopwatch() as watch,
            pytest.raises(EngineSilent, match=r"no token for any request within engine.deadline_s = 0\.4 s"),
        ):
            ask(engine, on_token=hang)
        assert watch.seconds < 1.5


def test_a_request_that_waits_its_turn_is_not_a_silent_engine() -> None:
    others, heard = threading.Event(), list[int]()

    def hear(token: int, *_: Any) -> None:
        heard.append(token)
        if len(heard) == 24:
            others.set()

    def slow(body: Any, events: list[Any]) -> list[Any]:
        if body["prompt"] == [2]:  # it waits behind the other
            assert others.wait(20)
        return events

    with running(events=slow, pause_s=0.05) as server:
        engine = engine_at(server, deadline_s=0.4)

        async def scenario() -> Any:
            return await asyncio.gather(
                engine.generate([1], Sampling(max_tokens=24), on_token=hear),
                engine.generate([2], Sampling(max_tokens=2)),
            )

        assert [len(completion.ids) for completion in play(engine, scenario)] == [24, 2]


def test_it_is_lost_after_three_misses_and_found_when_it_answers_again() -> None:
    with running() as server:
        engine = engine_at(server)

        async def scenario() -> None:
            await asyncio.wait_for(engine.found(), 10)
            looks = server.script.looks
            looks += [503, 503, 200] * 3
            losing = asyncio.create_task(engine.lost())
            await until(lambda: not looks)
            assert not losing.done()
            server.script.health = 503
            await asyncio.wait_for(losing, 10)
            looks += [503] * 5
            finding = asyncio.create_task(engine.found())
            await until(lambda: not looks)
            assert not finding.done()
            server.script.health = 200
            await asyncio.wait_for(finding, 10)

        play(engine, scenario)
    wait_until(lambda: server.script.running == 0)
