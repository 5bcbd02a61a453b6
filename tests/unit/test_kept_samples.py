"""What a vLLM worker keeps of the tokens that it samples, and how an engine reads it, step by step."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem.engine.vllm.token_reader import TokenReader
from tandem.errors import EngineError, EngineLost
from tandem.ops.vllm_token_protocol import MARK, unpacked
from tandem.types import Span
from tandem.vllm_worker.token_recorder import RecordedTokens, Unfit, keep_sampled


def new(name: str, mark: str | None) -> Any:
    arguments = {MARK: mark} if mark else None
    return SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=arguments, logprobs=None))


def step(*begun: Any, finished: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(scheduled_new_reqs=list(begun), finished_req_ids=set(finished))


def output(**sampled: tuple[int, float] | None) -> Any:
    """None: a part of a prompt was computed, and what its row holds means nothing."""
    rows = [each or (99, -9.0) for each in sampled.values()]
    logprobs = SimpleNamespace(
        logprob_token_ids=np.array([[token, 3] for token, _ in rows], np.int32),
        logprobs=np.array([[logprob, -0.1] for _, logprob in rows], np.float32),
    )
    ids = [[each[0]] if each else [] for each in sampled.values()]
    return SimpleNamespace(req_ids=list(sampled), sampled_token_ids=ids, logprobs=logprobs)


def read(kept: RecordedTokens, mark: str, start: int = 0, end: int = 99) -> tuple[list[int], list[float]]:
    ids, logprobs, _ = unpacked(kept.read([(mark, start, end)], [], [])[mark])
    return ids.tolist(), [round(each, 3) for each in logprobs]


def test_only_marked_requests_are_kept_and_the_scheduler_s_own_parameters_stay_as_they_are():
    kept, marked, other = RecordedTokens(3), new("a-1", "a"), new("b-1", None)
    theirs = marked.sampling_params
    kept.scheduled(step(marked, other))
    assert (theirs.logprobs, marked.sampling_params.logprobs, other.sampling_params.logprobs) == (None, 0, None)
    kept.sampled(output(**{"a-1": (7, -0.5), "b-1": (8, -0.25)}))
    kept.sampled(output(**{"b-1": (9, -0.25), "a-1": (6, -1.5)}))
    assert read(kept, "a") == ([7, 6], [-0.5, -1.5])
    assert read(kept, "a", 1) == ([6], [-1.5])
    assert (len(kept), kept.under_way) == (1, 1)


def test_parts_of_a_prompt_sample_nothing_and_a_preempted_request_goes_on_where_it_was():
    kept = RecordedTokens(3)
    kept.scheduled(step(new("a-1", "a")))
    kept.sampled(output(**{"a-1": None}))
    kept.sampled(output(**{"a-1": (7, -0.5)}))
    kept.scheduled(step(new("a-1", "a")))  # with the token that it had
    kept.sampled(output(**{"a-1": None}))
    kept.sampled(output(**{"a-1": (6, -1.5)}))
    assert read(kept, "a") == ([7, 6], [-0.5, -1.5])


def test_what_is_sampled_after_the_end_is_not_kept_and_what_was_read_is_gone():
    kept = RecordedTokens(3)
    kept.scheduled(step(new("a-1", "a"), new("b-1", "b")))
    kept.sampled(output(**{"a-1": (7, -0.5), "b-1": (1, -0.5)}))
    kept.scheduled(step(finished=("a-1",)))
    kept.sampled(output(**{"a-1": (6, -1.5), "b-1": (2, -0.5)}))
    assert unpacked(kept.read([], [("a", 0, 1)], ["b"])["a"]) == (array("i", [7]), array("f", [-0.5]), [[0, 3]])
    assert (len(kept), kept.under_way) == (0, 1)
    kept.scheduled(step(finished=("b-1",)))
    assert kept.under_way == 0
    assert read(kept, "a") == ([], [])


def test_of_each_token_it_is_known_which_version_made_it():
    kept = RecordedTokens(3)
    kept.scheduled(step(new("a-1", "a"), new("b-1", "b"), new("c-1", "c")))
    kept.sampled(output(**{"a-1": (7, -0.5), "b-1": (1, -0.5), "c-1": None}))
    kept.scheduled(step(finished=("b-1",)))
    kept.serve(4)
    kept.serve(5)  # nothing was made by the fourth
    kept.scheduled(step(new("d-1", "d")))
    kept.sampled(output(**{"a-1": (6, -1.5), "c-1": (2, -0.5), "d-1": (8, -0.5)}))
    news = kept.read([("a", 0, 9)], [("b", 0, 1), ("c", 0, 1), ("d", 0, 1)], [])
    since = {name: unpacked(told)[2] for name, told in news.items()}
    assert since == {"a": [[0, 3], [1, 5]], "b": [[0, 3]], "c": [[0, 5]], "d": [[0, 5]]}


@pytest.mark.parametrize("fault", ["no logprobs", "of another token"])
def test_logprobs_that_are_not_those_of_the_tokens_are_an_error(fault: str):
    kept = RecordedTokens(3)
    kept.scheduled(step(new("a-1", "a")))
    told = output(**{"a-1": (7, -0.5)})
    if fault == "no logprobs":
        told.logprobs = None
    else:
        told.sampled_token_ids = [[8]]
    kept.sampled(told)
    with pytest.raises(EngineError, match=r"computed"):
        read(kept, "a")


class Runner:
    """As vLLM's: what it samples is still on its way when it answers."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def execute_model(self, scheduler_output: Any) -> None:
        self.begun.append(scheduler_output)

    def sample_tokens(self, grammar: Any) -> Any:
        return SimpleNamespace(get_output=lambda: output(**{"a-1": (7, -0.5)}))


def test_the_runner_s_steps_are_listened_to_and_answer_as_before():
    runner: Any = Runner()
    kept = keep_sampled(runner, SimpleNamespace(speculative_config=None), 3)
    runner.execute_model(step(new("a-1", "a")))
    coming = runner.sample_tokens(None)
    assert read(kept, "a") == ([], [])
    assert coming.get_output().sampled_token_ids == [[7]]
    assert read(kept, "a") == ([7], [-0.5])
    assert len(runner.begun) == 1


def test_what_does_not_work_as_is_needed_is_named():
    with pytest.raises(Unfit, match="sample_tokens"):
        keep_sampled(SimpleNamespace(execute_model=print), SimpleNamespace(speculative_config=None), 3)
    with pytest.raises(Unfit, match="speculative"):
        keep_sampled(Runner(), SimpleNamespace(speculative_config=object()), 3)


# --- the reader


class Workers:
    """One that keeps tokens, behind calls that take a moment."""

    def __init__(self) -> None:
        self.kept, self.calls = RecordedTokens(3), 0
        self.error: Exception | None = None

    def begin(self, name: str) -> None:
        self.kept.scheduled(step(new(name, name)))

    def sample(self, name: str, *tokens: int) -> None:
        for token in tokens:
            self.kept.sampled(output(**{name: (token, -token / 8)}))

    async def read(self, running: Any, ended: Any, dropped: Any) -> Any:
        self.calls += 1
        news = self.kept.read(running, ended, dropped) if self.error is None else {}
        await asyncio.sleep(0.005)
        if self.error is not None:
            raise self.error
        return news


def test_requests_that_end_together_are_read_together():
    async def play() -> tuple[list[list[float]], int]:
        workers = Workers()
        reader = TokenReader(workers.read, "m")

        async def one(number: int) -> list[float]:
            with reader.request(4, (), None) as request:
                workers.begin(request.name)
                workers.sample(request.name, number, 1, 2)
                return await reader.logprobs(request, [number, 1])

        found = await asyncio.gather(*map(one, range(50)))
        assert len(workers.kept) == 0
        return found, workers.calls

    found, calls = asyncio.run(play())
    assert found == [[-number / 8, -1 / 8] for number in range(50)]
    assert calls <= 2


def test_tokens_are_told_as_they_are_made_and_none_beyond_the_end():
    async def play() -> list[int]:
        workers, told = Workers(), list[int]()
        reader = TokenReader(workers.read, "m")
        with reader.request(9, (5,), lambda token, _logprob, _version: told.append(token)) as request:
            workers.begin(request.name)
            workers.sample(request.name, 1, 2, 3, 4)
            while len(told) < 2:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            assert told == [1, 2]  # 2 may have been the last
            workers.sample(request.name, 5, 6, 7, 8, 9)  # vLLM would have stopped at one of these, too
            while len(told) < 5:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)
            assert told == [1, 2, 3, 4, 5]
            assert await reader.logprobs(request, told) == [-token / 8 for token in told]
        await reader.close()
        return told

    assert asyncio.run(play()) == [1, 2, 3, 4, 5]


def test_each_token_is_told_with_its_version_and_a_completion_says_how_many_are_of_which():
    async def play() -> None:
        workers, told = Workers(), list[tuple[int, int]]()
        reader = TokenReader(workers.read, "m")
        with reader.request(9, (5,), lambda token, _logprob, version: told.append((token, version))) as request:
            workers.begin(request.name)
            workers.sample(request.name, 1, 2, 3, 4)
            while len(told) < 2:
                await asyncio.sleep(0.005)
            workers.kept.serve(4)
            workers.sample(request.name, 5)
            workers.kept.serve(5)
            assert await reader.logprobs(request, [1, 2, 3, 4, 5]) == [-token / 8 for token in (1, 2, 3, 4, 5)]
            assert told == [(1, 3), (2, 3), (3, 3), (4, 3), (5, 4)]
            assert request.spans == [Span(3, 4), Span(4, 1)]
        await reader.close()

    asyncio.run(play())


def test_a_request_that_is_given_up_is_dropped_with_the_next_reading():
    async def play() -> None:
        workers = Workers()
        reader = TokenReader(workers.read, "m")
        with reader.request(4, (), None) as given_up:
            workers.begin(given_up.name)
            workers.sample(given_up.name, 1)
        assert len(workers.kept) == 1
        with reader.request(4, (), None) as request:
            workers.begin(request.name)
            workers.sample(request.name, 1)
            await reader.logprobs(request, [1])
        assert len(workers.kept) == 0

    asyncio.run(play())


def test_other_tokens_than_were_answered_are_an_error_and_so_are_workers_that_are_gone():
    async def play() -> None:
        workers = Workers()
        reader = TokenReader(workers.read, "m")
        with reader.request(4, (), None) as request:
            workers.begin(request.name)
            workers.sample(request.name, 1, 2)
            with pytest.raises(EngineError, match="recorded other ones"):
                await reader.logprobs(request, [1, 3])
        workers.error = EngineLost("gone")
        with reader.request(4, (), None) as request, pytest.raises(EngineLost):
            await reader.logprobs(request, [1, 2])

    asyncio.run(play())


def test_who_fails_at_being_told_fails_alone():
    async def play() -> None:
        workers, told = Workers(), list[int]()
        reader = TokenReader(workers.read, "m")

        def fail(token: int, _logprob: float, _version: int) -> None:
            raise KeyError(token)

        async def one(tell: Any) -> list[float]:
            with reader.request(4, (), tell) as request:
                workers.begin(request.name)
                workers.sample(request.name, 1, 2)
                await asyncio.sleep(0.05)
                return await reader.logprobs(request, [1, 2])

        failed, well = await asyncio.gather(
            one(fail), one(lambda token, *_: told.append(token)), return_exceptions=True
        )
        assert isinstance(failed, KeyError)
        assert well == [-1 / 8, -2 / 8]
        assert told == [1, 2]

    asyncio.run(play())
