"""Thinking runs: what a thought costs, and that one which never ends is no answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import pytest
from chat_tokenizers import chatml_tokenizer

from tandem.algo.policy_gradient import has_signal
from tandem.errors import SpecError, TemplateError
from tandem.protocols import Chat
from tandem.rollout.episode import Setting, play
from tandem.rollout.evaluate import evaluate
from tandem.rollout.producer import EnvironmentProducer
from tandem.rollout.store import MemoryStore
from tandem.spec.load import parse_spec
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Metrics, Outcome, Sampling, Span, Task, Thought, Trajectory

BYTES, CHATML = byte_tokenizer(), chatml_tokenizer()
PLAIN, THINKS, CHATML_THINKS = Renderer(BYTES), Renderer(BYTES, thinking=True), Renderer(CHATML, thinking=True)
TASK = Task("t", ({"role": "user", "content": "hi"},))
MAX_TOKENS = 40


class Says:
    """Turn after turn what it is told to, and then from the beginning again."""

    version = 0

    def __init__(self, *turns: str) -> None:
        self._turns, self._said = turns, 0

    async def generate(self, prompt_ids, sampling, *, session=None, on_token=None) -> Completion:
        ids = THINKS.encode(self._turns[self._said % len(self._turns)])
        self._said += 1
        ended = ids[-1] == THINKS.end_id
        return Completion(ids, [-0.5] * len(ids), [Span(0, len(ids))], "stop" if ended else "length")


class Pays:
    """The same for whatever it hears in so many turns."""

    def __init__(self, reward: float, turns: int = 1, **metrics: float) -> None:
        self._reward, self._turns, self._metrics = reward, turns, metrics
        self.heard: list[str] = []

    def tasks(self, split: str) -> Sequence[Task]:
        return [TASK] * 4

    async def run(self, task: Task, chat: Chat) -> Outcome:
        for _ in range(self._turns):
            self.heard.append((await chat.reply()).text)
            chat.say("and?")
        return Outcome(self._reward, dict(self._metrics))


def setting_of(environment: Pays, *turns: str, penalty: float = 0.0) -> Setting:
    return Setting(environment, Says(*turns), THINKS, Sampling(MAX_TOKENS), 4096, 5.0, 5.0, penalty)


def episode(environment: Pays, *turns: str, penalty: float = 0.0) -> Trajectory:
    setting = setting_of(environment, *turns, penalty=penalty)
    return asyncio.run(play(setting, TASK, THINKS.prompt(TASK.messages), seed=0))


# --- what the renderer knows of a thought


@pytest.mark.parametrize(
    ("renderer", "sampled", "thought"),
    [
        (THINKS, "6*7</think>\n42<|end|>", Thought(4, True)),
        (THINKS, "</think>42<|end|>", Thought(1, True)),
        (THINKS, "6*7</think>", Thought(4, True)),
        (THINKS, "6*7</think><|end|>", Thought(4, True)),
        (THINKS, "6*7 is for<|end|>", Thought(10, False)),
        (THINKS, "6*7 is for", Thought(10, False)),
        (THINKS, "a</think>b</think>c<|end|>", Thought(2, True)),
        (THINKS, "", Thought(0, False)),
        (PLAIN, "42<|end|>", None),
        (PLAIN, "so </think> 42<|end|>", None),
        (PLAIN, "<think>a</think>42<|end|>", Thought(3, True)),
        (CHATML_THINKS, "<think>\nlow\n</think>\n\n42<|im_end|>", Thought(6, True)),  # <think> Ċl o w Ċ </think>
        (CHATML_THINKS, "<think>\nlow", Thought(4, False)),
        (CHATML_THINKS, "42<|im_end|>", None),  # it may answer without a thought
    ],
)
def test_the_tokens_of_a_thought_are_counted_to_the_mark_that_closes_it(renderer, sampled, thought):
    assert renderer.thought(renderer.encode(sampled)) == thought


@pytest.mark.parametrize("text", ["x" * n + "</think>" + "y" * m for n in (0, 1, 2, 15, 16, 17) for m in (0, 1, 9)])
def test_a_mark_of_several_tokens_is_counted_whole(text):
    spelled = [id_ for character in text for id_ in THINKS.encode(character)]  # "<", "/", "t", ...
    assert len(spelled) == len(text)
    assert THINKS.thought(spelled) == Thought(text.index("</think>") + len("</think>"), True)


def test_a_thought_that_a_stop_string_cut_is_not_closed():
    assert THINKS.thought(THINKS.encode("6\nQ:"), ("\nQ:",)) == Thought(4, False)


def test_a_tokenizer_that_hides_the_mark_cannot_think():
    tokenizer = chatml_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    Renderer(tokenizer)
    with pytest.raises(TemplateError, match=r"model.thinking = true: </think> is a special token"):
        Renderer(tokenizer, thinking=True)


# --- what an unclosed thought scores

CLOSED, UNCLOSED = "6*7</think>42<|end|>", "6*7 is 42<|end|>"


@pytest.mark.parametrize(("says", "score"), [(CLOSED, 1.0), (UNCLOSED, 0.0), ("6*7 is 42", 0.0)])
def test_an_unclosed_thought_scores_0_whatever_the_environment_says(says, score):
    environment = Pays(1.0, correct=1.0, words=2.0)
    played = episode(environment, says)
    assert played.reward == score
    assert played.metrics == {"correct": score, "words": 2.0}
    assert played.unclosed == (score == 0)
    assert environment.heard == ["42" if score else ""]


def test_an_unclosed_thought_is_no_way_around_what_a_wrong_answer_costs():
    assert episode(Pays(-1.0), UNCLOSED).reward == -1.0


@pytest.mark.parametrize(
    ("turns", "reward"), [((CLOSED, CLOSED), 1.0), ((UNCLOSED, CLOSED), 0.0), ((CLOSED, UNCLOSED), 0.0)]
)
def test_one_unclosed_turn_of_several_is_enough(turns, reward):
    assert episode(Pays(1.0, turns=2), *turns).reward == reward


# --- what length costs


def test_length_costs_nothing_unless_asked():
    played = episode(Pays(1.0), CLOSED)
    assert (played.reward, played.shaping, played.thinking_tokens) == (1.0, 0.0, 4)


@pytest.mark.parametrize(
    ("turns", "share"),
    [
        ((CLOSED,), 4 / MAX_TOKENS),
        (("</think>42<|end|>",), 1 / MAX_TOKENS),
        ((CLOSED, "</think>42<|end|>"), 2.5 / MAX_TOKENS),  # a mean over turns: more turns cost no more
    ],
)
def test_the_penalty_is_its_share_of_max_tokens_times_the_coefficient(turns, share):
    played = episode(Pays(1.0, turns=len(turns)), *turns, penalty=0.5)
    assert (played.reward, played.shaping) == (1.0, pytest.approx(-0.5 * share))


def test_an_unclosed_thought_pays_for_its_length_too():
    """Else it would be worth more than a closed thought with a wrong answer."""
    played = episode(Pays(1.0), "x" * MAX_TOKENS, penalty=0.5)
    assert (played.reward, played.shaping) == (0.0, pytest.approx(-0.5))


# --- where it is seen


def metrics_of(environment: Pays, *turns: str, penalty: float = 0.0, max_replaced: int = 0) -> Metrics:
    async def run() -> Metrics:
        store = MemoryStore(2, take_timeout_s=5)
        producer = EnvironmentProducer(
            setting_of(environment, *turns, penalty=penalty), store, has_signal,
            group_size=2, seed=0, max_failed_share=0.0, max_replaced=max_replaced,
        )  # fmt: skip
        running = asyncio.create_task(producer.run())
        try:
            await store.take(2)
            return producer.drain_metrics()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return asyncio.run(run())


def test_a_step_says_how_much_was_thought_and_how_often_without_an_end():
    metrics = metrics_of(Pays(1.0), CLOSED, UNCLOSED)
    assert metrics["thinking/tokens"] == (4 + 9) / 2
    assert metrics["thinking/unclosed"] == 0.5
    assert metrics["reward/mean"] == 0.5
    assert not [name for name in metrics if name.startswith(("env/thinking", "reward/shaping"))]


def test_siblings_that_are_all_wrong_are_replaced_however_long_they_thought():
    metrics = metrics_of(Pays(0.0), CLOSED, "</think>42<|end|>", penalty=0.4, max_replaced=3)
    assert metrics["groups/dropped/no_signal"] == 3
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0.0, 0.0)
    assert metrics["reward/shaping"] == pytest.approx(-0.4 * 2.5 / MAX_TOKENS)


def test_an_evaluation_scores_the_unclosed_0_and_takes_nothing_off_for_length(caplog):
    async def scores(*metrics: str) -> list[float]:
        environment = Pays(1.0, **dict.fromkeys(metrics, 1.0))
        setting = setting_of(environment, CLOSED, UNCLOSED, penalty=0.5)
        return (await evaluate(setting, environment.tasks("eval"), MAX_TOKENS)).scores

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(scores()) == [1.0, 0.0, 1.0, 0.0]
    assert asyncio.run(scores("correct")) == [1.0, 0.0, 1.0, 0.0]
    assert "2 of 4 answers score 0: their thinking never ended" in caplog.text


# --- the spec


def spec(**train: object) -> Callable[[bool], object]:
    stage = {"steps": 2, "lr": 1e-3, "groups_per_step": 2, "group_size": 2, **train}

    def parse(thinking: bool) -> object:
        model = {"preset": "tiny", "thinking": thinking}
        return parse_spec({"recipe": "rl", "model": model, "environment": {"name": "sort"}, "train": stage})

    return parse


def test_a_penalty_without_thinking_is_refused():
    spec(thinking_length_penalty=0.1)(True)
    spec()(False)
    with pytest.raises(SpecError, match=r"train.thinking_length_penalty = 0.1: has no effect while model.thinking"):
        spec(thinking_length_penalty=0.1)(False)
