"""Faults in environment code: each costs its own group, is counted by kind, and has no other effect."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.errors import EngineError, EngineSilent, EpisodeFailed, TemplateError, TooManyFailures
from tandem.rollout.deadlines import GRACE_S, why_not
from tandem.rollout.episode import Setting, play
from tandem.rollout.producer import EnvironmentProducer
from tandem.rollout.store import MemoryStore
from tandem.types import Completion, Group, Outcome, Sampling, Span, Task

LIMIT_S = 0.3
SLACK_S = 0.5

Play = Callable[[Any], Awaitable[Any]]


class Engine:
    version = 0

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s, self.requests = takes_s, 0

    async def generate(self, prompt_ids, sampling: Sampling, *, session=None, on_token=None) -> Completion:
        self.requests += 1
        await asyncio.sleep(self.takes_s)
        return Completion([7], [-0.5], [Span(0, 1)], "stop")


class Plain:
    def prompt(self, messages) -> list[int]:
        return [0]

    def glue(self, messages, last_id: int) -> list[int]:
        if any(message["role"] == "oracle" for message in messages):
            raise TemplateError("model: its chat template refuses the roles oracle")
        return [0]

    def visible(self, ids, stop=()) -> str:
        return "seven"

    def thought(self, ids, stop=()) -> None:
        return None


class Mixed:
    """Every `every`-th task is played by `bad`; the others go well."""

    def __init__(self, bad: Play, every: int = 4) -> None:
        self.bad, self.every = bad, every

    def tasks(self, split: str) -> list[Task]:
        return [Task(str(index), ({"role": "user", "content": "?"},)) for index in range(4)]

    async def run(self, task: Task, chat: Any) -> Any:
        if int(task.id) % self.every == 0:
            return await self.bad(chat)
        await chat.reply()
        return Outcome(1.0, {"correct": 1.0})


def setting_of(
    environment: Any, engine: Any = None, limit_s: float = LIMIT_S, engine_deadline_s: float = 5.0
) -> Setting:
    return Setting(environment, engine or Engine(), Plain(), Sampling(), 64, engine_deadline_s, limit_s)


@dataclass
class Played:
    took_s: float
    dropped: Counter[str] = field(default_factory=Counter)
    kept: list[Group] = field(default_factory=list)
    error: BaseException | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def produce(setting: Setting, *, groups: int = 6, max_failed_share: float = 1.0, group_size: int = 2) -> Played:
    """The real producer and store, until so many groups were kept or the producer ended."""

    async def scenario() -> Played:
        store = MemoryStore(groups + 4, take_timeout_s=10.0)
        producer = EnvironmentProducer(
            setting, store, lambda group: True, group_size=group_size, seed=0, max_failed_share=max_failed_share
        )
        started = time.perf_counter()
        running = asyncio.create_task(producer.run())
        taking = asyncio.create_task(store.take(groups))
        await asyncio.wait([running, taking], return_when=asyncio.FIRST_COMPLETED)
        played = Played(time.perf_counter() - started, store.dropped)
        for task in (running, taking):
            task.cancel()
        ended = await asyncio.gather(running, taking, return_exceptions=True)
        played.error = None if isinstance(ended[0], asyncio.CancelledError) else ended[0]
        played.kept = ended[1] if isinstance(ended[1], list) else []
        played.metrics = producer.drain_metrics()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert left == set()
        return played

    return asyncio.run(scenario())


def in_time(within_s: float, play: Callable[[], Played]) -> Played:
    """The first of three that is: a busy machine is late now and then, a mistake every time."""
    played = play()
    for _ in range(2):
        if played.took_s >= within_s:
            played = play()
    assert played.took_s < within_s
    return played


# --- every way to fail


async def raises(chat) -> Outcome:
    await chat.reply()
    return Outcome(1 / 0)


async def raises_before_the_first_reply(chat) -> Outcome:
    raise KeyError("answer")


async def times_out_by_itself(chat) -> Outcome:
    raise TimeoutError("the judge did not answer")


async def cancels_itself(chat) -> Outcome:
    judge = asyncio.ensure_future(asyncio.Event().wait())
    judge.cancel()
    await judge
    return Outcome(1.0)


async def says_what_the_template_refuses(chat) -> Outcome:
    await chat.reply()
    chat.say({"role": "oracle", "content": "?"})
    await chat.reply()
    return Outcome(1.0)


async def replies_twice_at_once(chat) -> Outcome:
    await asyncio.gather(chat.reply(), chat.reply())
    return Outcome(1.0)


async def never_replies(chat) -> Outcome:
    return Outcome(1.0)


async def hangs(chat) -> Outcome:
    await chat.reply()
    await asyncio.Event().wait()
    return Outcome(1.0)


async def hangs_whatever_it_is_told(chat) -> Outcome:
    await chat.reply()
    while True:
        try:
            await asyncio.Event().wait()
        except:  # noqa: E722 - as careless code has it
            continue


async def cleans_up_when_cancelled(chat) -> Outcome:
    try:
        return await hangs(chat)
    finally:
        await asyncio.sleep(0.01)


async def sleeps(chat) -> Outcome:
    await chat.reply()
    time.sleep(30)
    return Outcome(1.0)


async def loops(chat) -> Outcome:
    await chat.reply()
    while True:
        pass


async def matches_a_catastrophic_pattern(chat) -> Outcome:
    await chat.reply()
    re.match(r"(a+)+$", "a" * 64 + "b")
    return Outcome(1.0)


async def swallows_the_alarm(chat) -> Outcome:
    await chat.reply()
    for _ in range(2):
        with contextlib.suppress(BaseException):
            time.sleep(30)
    return Outcome(1.0)


def returns(value: Any) -> Play:
    async def run(chat) -> Any:
        await chat.reply()
        return value

    return run


FAULTS = {
    "raises": (raises, "raised"),
    "raises before the first reply": (raises_before_the_first_reply, "raised"),
    "times out by itself": (times_out_by_itself, "raised"),
    "cancels itself": (cancels_itself, "raised"),
    "replies twice at once": (replies_twice_at_once, "raised"),
    "says what the template refuses": (says_what_the_template_refuses, "template"),
    "never replies": (never_replies, "no_reply"),
    "returns None": (returns(None), "no_outcome"),
    "returns a number": (returns(1.0), "no_outcome"),
    "reward NaN": (returns(Outcome(float("nan"))), "not_a_number"),
    "reward inf": (returns(Outcome(float("inf"))), "not_a_number"),
    "reward None": (returns(Outcome(None)), "not_a_number"),
    "reward a word": (returns(Outcome("good")), "not_a_number"),
    "reward a number in quotes": (returns(Outcome("1.0")), "not_a_number"),
    "reward too large": (returns(Outcome(10**400)), "not_a_number"),
    "reward that nothing can be added to": (returns(Outcome(1.7e308)), "not_a_number"),
    "metric that nothing can be added to": (returns(Outcome(1.0, {"score": -1.1e30})), "not_a_number"),
    "metric NaN": (returns(Outcome(1.0, {"correct": float("nan")})), "not_a_number"),
    "metrics None": (returns(Outcome(1.0, None)), "not_a_number"),
    "hangs": (hangs, "hung"),
    "cleans up when cancelled": (cleans_up_when_cancelled, "hung"),
    "hangs whatever it is told": (hangs_whatever_it_is_told, "hung"),
    "sleeps": (sleeps, "hung"),
    "loops": (loops, "hung"),
    "catastrophic pattern": (matches_a_catastrophic_pattern, "hung"),
    "swallows the alarm": (swallows_the_alarm, "hung"),
}
SLOWEST_S = {"hangs whatever it is told": LIMIT_S + GRACE_S, "swallows the alarm": 2 * LIMIT_S}


@pytest.mark.filterwarnings("ignore:Exception ignored in")  # an alarm may ring in a callback of the collector
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_its_own_group_and_is_counted_under_its_kind(name):
    bad, kind = FAULTS[name]
    # Two groups fail on the way: one after the other where they block, together where they wait.
    within_s = 3 * SLOWEST_S.get(name, LIMIT_S if kind == "hung" else 0.0) + SLACK_S
    limit_s = LIMIT_S if kind == "hung" else 60.0  # a busy machine may stand still for the shorter one
    played = in_time(within_s, lambda: produce(setting_of(Mixed(bad), limit_s=limit_s), groups=6))
    assert played.error is None
    assert len(played.kept) == 6
    assert {each.task_id for group in played.kept for each in group} == {"1", "2", "3"}
    assert played.dropped.keys() == {kind}
    assert played.metrics[f"groups/dropped/{kind}"] == played.dropped[kind] >= 1


@pytest.mark.parametrize("bad", [sleeps, loops], ids=lambda bad: bad.__name__)
def test_siblings_that_would_block_as_well_are_not_let_run(bad):
    """Eight siblings, one alarm: else each group would hold the run for eight deadlines."""
    let_run: list[str] = []

    class Chat:
        """`bad` blocks as soon as it has its reply."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def reply(self) -> Any:
            reply = await self.inner.reply()
            let_run.append(reply.text)
            return reply

    played = produce(setting_of(Mixed(lambda chat: bad(Chat(chat)))), groups=3, group_size=8)
    assert played.dropped.keys() == {"hung"}
    assert len(let_run) == played.dropped["hung"]


def test_while_one_environment_blocks_the_deadlines_of_the_others_stand_still(caplog):
    async def blocks_in_the_midst(chat) -> Outcome:
        await asyncio.sleep(0.05)
        time.sleep(30)
        return Outcome(1.0)

    engine = Engine(takes_s=0.15)  # the others wait for it when the event loop is held, and for LIMIT_S nothing comes
    played = produce(setting_of(Mixed(blocks_in_the_midst), engine, engine_deadline_s=LIMIT_S), groups=3)
    assert played.error is None
    assert len(played.kept) == 3
    failures = [record.getMessage() for record in caplog.records]
    assert failures
    assert all("task 0: the environment held the event loop" in failure for failure in failures)


def test_a_metric_called_reward_does_not_become_the_reward():
    async def scenario() -> tuple[float, dict[str, float]]:
        environment = Mixed(returns(Outcome(0.25, {"reward": 9.0, "correct": True})))
        trajectory = await play(setting_of(environment), environment.tasks("train")[0], [0], 0)
        return trajectory.reward, trajectory.metrics

    assert asyncio.run(scenario()) == (0.25, {"reward": 9.0, "correct": 1.0})


def test_a_reply_that_was_given_up_leaves_no_trace_in_the_trajectory():
    class SlowOnce(Engine):
        async def generate(self, prompt_ids, sampling, **unused) -> Completion:
            self.takes_s = 0.0 if self.requests else 1.0
            self.prompts = [*getattr(self, "prompts", []), list(prompt_ids)]
            return await super().generate(prompt_ids, sampling)

    async def impatient(chat) -> Outcome:
        chat.say("quick!")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(chat.reply(), 0.02)
        await chat.reply()
        return Outcome(1.0)

    engine, environment = SlowOnce(), Mixed(impatient)
    trajectory = asyncio.run(play(setting_of(environment, engine), environment.tasks("train")[0], [0], 0))
    assert engine.prompts == [[0], [0]]
    assert trajectory.ids == [0, 7]
    assert [message["content"] for message in trajectory.messages] == ["?", "quick!", "seven"]


# --- too many


def test_too_large_a_share_of_failures_ends_the_producer():
    played = produce(setting_of(Mixed(raises, every=1)), max_failed_share=0.2)
    assert isinstance(played.error, BaseExceptionGroup)
    first = played.error.exceptions[0]
    assert isinstance(first, TooManyFailures)
    assert "5 of the last 5 groups failed" in str(first)
    assert "environment.max_failed_share = 0.2" in str(first)
    assert "ZeroDivisionError: division by zero" in str(first)


def test_a_share_of_failures_within_the_limit_goes_on():
    played = produce(setting_of(Mixed(raises)), groups=90, max_failed_share=0.3)  # one task in four fails
    assert played.error is None
    assert len(played.kept) == 90
    assert played.dropped["raised"] >= 25


def test_a_share_of_failures_just_over_the_limit_ends_it():
    played = produce(setting_of(Mixed(raises)), groups=90, max_failed_share=0.2)
    assert isinstance(played.error, BaseExceptionGroup)
    assert isinstance(played.error.exceptions[0], TooManyFailures)


# --- a dead engine is not the environment's failure


class Dead(Engine):
    async def generate(self, prompt_ids, sampling, **unused) -> Completion:
        self.requests += 1
        raise EngineError("engine: stopped by RuntimeError: out of memory")


class Silent(Engine):
    async def generate(self, prompt_ids, sampling, **unused) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError


async def scores_zero_on_any_error(chat) -> Outcome:
    try:
        await chat.reply()
    except Exception:  # noqa: BLE001
        return Outcome(0.0)
    return Outcome(1.0)


async def raises_something_else(chat) -> Outcome:
    try:
        await chat.reply()
    except Exception as error:
        raise ValueError("no answer") from error
    return Outcome(1.0)


async def tries_again_for_ever(chat) -> Outcome:
    while True:
        try:
            await chat.reply()
        except Exception:  # noqa: BLE001
            await asyncio.sleep(0)


async def tries_again_without_a_pause(chat) -> Outcome:
    while True:
        with contextlib.suppress(Exception):
            await chat.reply()


async def waits_for_ever_after_an_error(chat) -> Outcome:
    with contextlib.suppress(Exception):
        await chat.reply()
    await asyncio.Event().wait()
    return Outcome(1.0)


HIDING = [
    scores_zero_on_any_error, raises_something_else, tries_again_for_ever, tries_again_without_a_pause,
    waits_for_ever_after_an_error,
]  # fmt: skip


@pytest.mark.parametrize("hiding", HIDING, ids=lambda hiding: hiding.__name__)
@pytest.mark.parametrize(("engine", "named"), [(Dead(), EngineError), (Silent(), EngineSilent)], ids=["dead", "silent"])
def test_a_broad_except_cannot_hide_a_dead_engine(hiding, engine, named):
    setting = setting_of(Mixed(hiding, every=1), engine, engine_deadline_s=0.1)
    played = in_time(LIMIT_S + SLACK_S, lambda: produce(setting))
    assert isinstance(played.error, BaseExceptionGroup)
    assert type(played.error.exceptions[0]) is named
    assert played.dropped == {}


# --- the alarm


def test_the_alarm_can_be_engaged_on_the_main_thread():
    assert why_not() == ""


def test_in_another_thread_the_alarm_says_that_it_is_not_engaged():
    """There a short block is waited out: nothing is cut off, and nothing breaks."""

    async def naps(chat) -> Outcome:
        await chat.reply()
        time.sleep(0.1)
        return Outcome(0.5)

    said: list[Any] = []

    def elsewhere() -> None:
        said.append(why_not())
        environment = Mixed(naps)
        setting = setting_of(environment, limit_s=0.05)
        try:
            said.append(asyncio.run(play(setting, environment.tasks("train")[0], [0], 0)))
        except EpisodeFailed as failure:
            said.append(failure)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(5)
    assert said[0] == "signals reach the main thread only, and this is another one"
    assert said[1].reward == 0.5


def test_the_alarm_leaves_the_timer_and_the_handler_of_others_as_they_were():
    rang: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rang.append(number))
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, 100.0)
    try:
        produce(setting_of(Mixed(sleeps)), groups=3)
        delay_s, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 90 < delay_s < 100 - LIMIT_S
        signal.raise_signal(signal.SIGALRM)
        assert rang == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
