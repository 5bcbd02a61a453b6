"""Recorded trajectories equal, id by id, what the engine was given and sampled; no text is tokenised twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from chat_tokenizers import chatml_tokenizer, written

from tandem.errors import EpisodeFailed
from tandem.rollout.deadlines import Clock
from tandem.rollout.recorder import Recorder
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import NO_VERSION, Completion, FinishReason, Sampling, Span, Task, Trajectory

BYTES, CHATML = byte_tokenizer(), chatml_tokenizer()
PLAIN, THINKS = Renderer(BYTES), Renderer(BYTES, thinking=True)
CHATML_PLAIN, CHATML_THINKS = Renderer(CHATML), Renderer(CHATML, thinking=True)
TASK = Task("t", ({"role": "user", "content": "hi"},))

Said = tuple[list[int], FinishReason]


class ScriptedEngine:
    """Says what it is told to, and keeps its own log of all it was asked and all it said."""

    version = 0

    def __init__(self, turns: Sequence[Said]) -> None:
        self._turns = list(turns)
        self.prompts: list[list[int]] = []
        self.said: list[Completion] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt_ids, sampling: Sampling, *, session=None, on_token=None) -> Completion:
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        ids, reason = self._turns[len(self.said)]
        turn = len(self.said) + 1
        half = len(ids) // 2  # the weights changed in the midst of it
        spans = [Span(turn, half), Span(turn + 1, len(ids) - half)]
        completion = Completion(ids, [-turn - index / 100 for index in range(len(ids))], spans, reason)
        self.said.append(completion)
        return completion


def recorder_of(engine: Any, renderer: Renderer, *, max_context: int = 4096, task: Task = TASK, **sampling) -> Recorder:
    return Recorder(
        engine, renderer, task, renderer.prompt(task.messages), Sampling(**sampling),
        max_context=max_context, deadline_s=5.0, seed=7, clock=Clock(),
    )  # fmt: skip


def play(renderer: Renderer, turns: Sequence[str | Said], between: Sequence[Any], **settings) -> tuple[Trajectory, Any]:
    """A text is sampled as the tokenizer writes it, and ends with a stop; `between` is said before turns 2, 3, ..."""
    said: list[Said] = [(renderer.encode(turn), "stop") if isinstance(turn, str) else turn for turn in turns]
    engine = ScriptedEngine(said)
    recorder = recorder_of(engine, renderer, **settings)

    async def episode() -> None:
        for number in range(len(said)):
            if number:
                recorder.say(*between[number - 1])
            await recorder.reply()

    asyncio.run(episode())
    return recorder.trajectory(1.0, {}), engine


EPISODES = {
    "one turn": (
        PLAIN, ["42<|end|>"], [],
        "<|user|>hi<|end|><|assistant|>[[42<|end|>]]",
    ),
    "two turns": (
        PLAIN, ["42<|end|>", "ok<|end|>"], [["no"]],
        "<|user|>hi<|end|><|assistant|>[[42<|end|>]]<|user|>no<|end|><|assistant|>[[ok<|end|>]]",
    ),
    "a tool answers": (
        PLAIN, ["<tool_call>add</tool_call><|end|>", "ok<|end|>"], [[{"role": "tool", "content": "42"}, "and?"]],
        "<|user|>hi<|end|><|assistant|>[[<tool_call>add</tool_call><|end|>]]"
        "<|tool|>42<|end|><|user|>and?<|end|><|assistant|>[[ok<|end|>]]",
    ),
    "cut by its length: the end that follows is not trained": (
        PLAIN, [(PLAIN.encode("42"), "length"), "ok<|end|>"], [["no"]],
        "<|user|>hi<|end|><|assistant|>[[42]]<|end|><|user|>no<|end|><|assistant|>[[ok<|end|>]]",
    ),
    "ended by a stop string: the string is trained, the end is not": (
        PLAIN, [(PLAIN.encode("42\nQ:"), "stop"), "ok<|end|>"], [["no"]],
        "<|user|>hi<|end|><|assistant|>[[42\nQ:]]<|end|><|user|>no<|end|><|assistant|>[[ok<|end|>]]",
    ),
    "the last turn cut: nothing is added": (
        PLAIN, [(PLAIN.encode("42"), "length")], [],
        "<|user|>hi<|end|><|assistant|>[[42]]",
    ),
    "thinking: the template opens the thought, the policy closes it": (
        THINKS, ["6*7</think>42<|end|>", "</think>ok<|end|>"], [["no"]],
        "<|user|>hi<|end|><|assistant|><think>[[6*7</think>42<|end|>]]"
        "<|user|>no<|end|><|assistant|><think>[[</think>ok<|end|>]]",
    ),
    "nothing said between two turns": (
        PLAIN, ["42<|end|>", "ok<|end|>"], [[]],
        "<|user|>hi<|end|><|assistant|>[[42<|end|>]]<|assistant|>[[ok<|end|>]]",
    ),
    "chatml: two turns": (
        CHATML_PLAIN, ["low<|im_end|>", "ok<|im_end|>"], [["42"]],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[low<|im_end|>]]"
        "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[ok<|im_end|>]]",
    ),
    "chatml: earlier thoughts stay, though the template cuts them": (
        CHATML_THINKS, ["<think>\nlow\n</think>\n\nok<|im_end|>", "<think>\n\n</think>\n\n42<|im_end|>"], [["42"]],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[<think>\nlow\n</think>\n\nok<|im_end|>]]"
        "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\n42<|im_end|>]]",
    ),
    "chatml: a tool answers": (
        CHATML_PLAIN,
        ["<tool_call>\nlow\n</tool_call><|im_end|>", "ok<|im_end|>"],
        [[{"role": "tool", "content": "42"}]],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "[[<tool_call>\nlow\n</tool_call><|im_end|>]]\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[[ok<|im_end|>]]",
    ),
    "chatml: cut by its length": (
        CHATML_PLAIN, [(CHATML_PLAIN.encode("low"), "length"), "ok<|im_end|>"], [["42"]],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[low]]<|im_end|>"
        "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[ok<|im_end|>]]",
    ),
    "chatml: ended by the other end token, which then stands before the template's own": (
        CHATML_PLAIN, ["low<|endoftext|>", "ok<|im_end|>"], [["42"]],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[low<|endoftext|>]]<|im_end|>"
        "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[ok<|im_end|>]]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("renderer", "turns", "between", "text"), EPISODES.values(), ids=EPISODES.keys())
def test_the_trajectory_and_its_mask_are_exact_token_by_token(renderer, turns, between, text):
    trajectory, _ = play(renderer, turns, between)
    assert (trajectory.ids, trajectory.trained) == written(renderer.tokenizer, text)


@pytest.mark.parametrize("renderer", [PLAIN, THINKS, CHATML_PLAIN, CHATML_THINKS])
@pytest.mark.parametrize("num_turns", [1, 2, 5])
def test_the_trajectory_is_what_the_engine_saw_and_said(renderer, num_turns):
    end = renderer.decode([renderer.end_id], skip_special=False)
    turns = [f"low {turn}{end}" if turn != 2 else (renderer.encode("cut"), "length") for turn in range(num_turns)]
    trajectory, engine = play(renderer, turns, [[f"q{turn}"] for turn in range(1, num_turns)])
    assert len(engine.prompts) == num_turns
    for prompt_ids, completion in zip(engine.prompts, engine.said, strict=True):
        seen = len(prompt_ids)
        after = seen + len(completion.ids)
        assert trajectory.ids[:seen] == prompt_ids
        assert trajectory.ids[seen:after] == completion.ids
        assert trajectory.trained[seen:after] == [True] * len(completion.ids)
        assert trajectory.logprobs[seen:after] == completion.logprobs
        assert trajectory.versions[seen:after] == completion.versions
    assert trajectory.ids == engine.prompts[-1] + engine.said[-1].ids
    assert trajectory.num_trained == sum(len(completion.ids) for completion in engine.said)
    others = [index for index, on in enumerate(trajectory.trained) if not on]
    assert {trajectory.logprobs[index] for index in others} == {0.0}
    assert {trajectory.versions[index] for index in others} == {NO_VERSION}


# --- nothing is tokenised again


def unmerged(renderer: Renderer, text: str) -> list[int]:
    """Each character on its own, as a policy may well sample it, and no tokenizer would write it."""
    return [token_id for character in text for token_id in renderer.encode(character)]


class TokenisesAgain(Recorder):
    """Planted: each prompt is rendered from the messages."""

    async def reply(self, **settings) -> Any:
        self._ids = []
        messages = [*self._messages, *self._said]
        self._opening_ids, self._said = self._renderer.prompt(messages), []
        turn = await super().reply(**settings)
        self._messages = [*messages, self._messages[-1]]
        return turn


def two_turns_of_unmerged_ids(kind: type[Recorder]) -> tuple[Recorder, ScriptedEngine]:
    said = [*unmerged(CHATML_PLAIN, "\nlow 42"), CHATML_PLAIN.end_id]
    assert CHATML_PLAIN.encode("\nlow 42") != said[:-1]  # "\nl", "ow", ... would be merged
    engine = ScriptedEngine([(said, "stop"), (said, "stop")])
    recorder = kind(
        engine, CHATML_PLAIN, TASK, CHATML_PLAIN.prompt(TASK.messages), Sampling(),
        max_context=4096, deadline_s=5.0, seed=0, clock=Clock(),
    )  # fmt: skip

    async def episode() -> None:
        await recorder.reply()
        recorder.say("42")
        await recorder.reply()

    asyncio.run(episode())
    return recorder, engine


def test_ids_that_no_tokenizer_would_write_come_back_as_they_were_sampled():
    recorder, engine = two_turns_of_unmerged_ids(Recorder)
    first_prompt, first_said = engine.prompts[0], engine.said[0].ids
    assert engine.prompts[1][: len(first_prompt) + len(first_said)] == first_prompt + first_said
    assert recorder.trajectory(0.0, {}).ids == engine.prompts[1] + engine.said[1].ids


def test_a_planted_recorder_that_tokenises_again_shows_the_engine_other_ids():
    _, engine = two_turns_of_unmerged_ids(TokenisesAgain)
    first_prompt, first_said = engine.prompts[0], engine.said[0].ids
    assert engine.prompts[1][: len(first_prompt) + len(first_said)] != first_prompt + first_said


# --- what the environment gets


@pytest.mark.parametrize(
    ("renderer", "sampled", "text"),
    [
        (PLAIN, "42<|end|>", "42"),
        (THINKS, "6*7</think>\n42<|end|>", "42"),
        (THINKS, "6*7 is for", ""),
        (CHATML_THINKS, "<think>\nlow\n</think>\n\n42<|im_end|>", "42"),
        (CHATML_THINKS, "<think>\nlow", ""),
    ],
)
def test_a_reply_has_no_thought_and_a_thought_that_does_not_end_is_no_answer(renderer, sampled, text):
    async def episode() -> str:
        recorder = recorder_of(ScriptedEngine([(renderer.encode(sampled), "stop")]), renderer)
        return (await recorder.reply()).text

    assert asyncio.run(episode()) == text


def test_a_reply_ends_before_its_stop_string():
    async def episode() -> tuple[str, tuple[str, ...]]:
        engine = ScriptedEngine([(PLAIN.encode("42\nQ:"), "stop")])
        turn = await recorder_of(engine, PLAIN).reply(stop=["\nQ:"])
        return turn.text, engine.samplings[0].stop

    assert asyncio.run(episode()) == ("42", ("\nQ:",))


@pytest.mark.parametrize(("reason", "status"), [("length", "truncated"), ("stop", "finished")])
def test_only_a_last_turn_that_was_cut_makes_a_trajectory_truncated(reason, status):
    trajectory, _ = play(PLAIN, [(PLAIN.encode("4"), "length"), (PLAIN.encode("2"), reason)], [["go on"]])
    assert trajectory.status == status


def test_messages_read_as_the_conversation_did():
    trajectory, _ = play(THINKS, ["6*7</think>42<|end|>", "</think>ok<|end|>"], [["no"]])
    assert [(m["role"], m["content"]) for m in trajectory.messages] == [
        ("user", "hi"), ("assistant", "42"), ("user", "no"), ("assistant", "ok"),
    ]  # fmt: skip


def test_what_is_said_before_the_first_reply_follows_the_task():
    async def episode() -> list[int]:
        engine = ScriptedEngine([(PLAIN.encode("42<|end|>"), "stop")])
        recorder = recorder_of(engine, PLAIN)
        recorder.say("and", {"role": "system", "content": "s"})
        await recorder.reply()
        return engine.prompts[0]

    assert asyncio.run(episode()) == PLAIN.encode("<|user|>hi<|end|><|user|>and<|end|><|system|>s<|end|><|assistant|>")


# --- how it asks


def test_each_turn_has_a_seed_of_its_own_and_no_more_tokens_than_there_is_room_for():
    prompt = len(PLAIN.prompt(TASK.messages))
    _, engine = play(PLAIN, ["4<|end|>", "2<|end|>"], [["no"]], max_context=prompt + 10, max_tokens=8)
    assert [sampling.seed for sampling in engine.samplings] == [7, 8]
    assert [len(p) + s.max_tokens for p, s in zip(engine.prompts, engine.samplings, strict=True)] == [
        prompt + 8,
        prompt + 10,
    ]


def test_an_environment_may_ask_for_fewer_tokens_but_not_for_more():
    async def episode() -> list[int]:
        engine = ScriptedEngine([(PLAIN.encode("4<|end|>"), "stop")] * 3)
        recorder = recorder_of(engine, PLAIN, max_tokens=8)
        for max_tokens in (3, 99, None):
            await recorder.reply(max_tokens=max_tokens)
        return [sampling.max_tokens for sampling in engine.samplings]

    assert asyncio.run(episode()) == [3, 8, 8]


def test_a_full_context_ends_the_episode_and_leaves_the_trajectory_as_it_was():
    prompt = len(PLAIN.prompt(TASK.messages))
    engine = ScriptedEngine([(PLAIN.encode("42<|end|>"), "stop")])
    recorder = recorder_of(engine, PLAIN, max_context=prompt + 5)

    async def episode() -> None:
        await recorder.reply()
        recorder.say("there is no room for this")
        with pytest.raises(EpisodeFailed, match="fills the context") as caught:
            await recorder.reply()
        assert caught.value.kind == "context_full"

    asyncio.run(episode())
    assert recorder.trajectory(0.0, {}).ids == engine.prompts[0] + engine.said[0].ids
    assert len(engine.prompts) == 1
