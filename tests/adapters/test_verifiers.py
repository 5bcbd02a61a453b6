"""Environments of verifiers, by its own rollout: one turn, a user who answers, tools. Our Chat is the model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import openai
import pytest
from recorded import WrittenEngine, episode, exact, played, played_in_a_worker

from tandem.env.adapters.verifiers_chat import SECRET, SESSION, Endpoint, VerifiersConversation
from tandem.env.load import load_environment
from tandem.errors import EpisodeFailed, SpecError
from tandem.rollout.recorder import AssistantTurn
from tandem.types import ToolCall

pytest.importorskip("verifiers", reason="verifiers is not installed here: make test-adapters")

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _an_installed_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # their tool servers are processes
    monkeypatch.setenv("HOME", str(tmp_path))


def sums(**taskset):
    return load_environment("verifiers:taskset-sums", {"taskset": taskset})


def test_one_turn_is_scored_by_their_rewards_with_their_weights():
    environment = sums(count=24)
    task = next(task for task in environment.tasks("train") if task.id == "sum 3")
    assert task.messages == ({"role": "system", "content": "Add."}, {"role": "user", "content": "3+3?"})
    trajectory, engine = played(environment, task, ["6"])
    assert trajectory.reward == 2.5
    assert trajectory.metrics == {"characters": 1, "reward/right": 2.0, "reward/short": 0.5, "turns": 1}
    assert len(engine.log) == 1
    assert played(environment, task, ["it must be seven"])[0].reward == 0.0


def test_what_is_held_out_is_decided_by_their_keys_or_by_a_split_of_theirs():
    environment = sums(count=64)
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert len(train) + len(held_out) == 64
    assert 2 <= len(held_out) <= 20
    assert environment.tasks("train") == train
    params = {"taskset": {"count": 4}, "eval_taskset": {"split": "test"}}
    environment = load_environment("verifiers:taskset-sums", params)
    assert [task.id for task in environment.tasks("train")] == [f"train/sum {n}" for n in range(4)]
    assert [task.id for task in environment.tasks("eval")] == [f"eval/sum {n}" for n in range(1000, 1004)]
    assert played(environment, environment.tasks("eval")[1], ["2002"])[0].reward == 2.5


def test_many_episodes_at_once_keep_apart():
    environment = sums(count=24)
    tasks = environment.tasks("train")[:12]

    def add(prompt: str) -> str:
        number = int(prompt.rpartition("+")[2].partition("?")[0])
        return str(2 * number)

    async def all_of_them():
        engines = [WrittenEngine(add) for _ in tasks]
        done = await asyncio.gather(
            *(episode(environment, task, engine) for task, engine in zip(tasks, engines, strict=True))
        )
        return done, engines

    for trajectory, engine in zip(*asyncio.run(all_of_them()), strict=True):
        exact(trajectory, engine)
        assert trajectory.reward == 2.5


def test_a_game_where_the_environment_is_the_user_is_recorded_turn_by_turn():
    environment = load_environment("verifiers:taskset-game")
    tasks = {task.id: task for split in ("train", "eval") for task in environment.tasks(split)}
    trajectory, engine = played(environment, tasks["secret-5"], ["8", "3", "5"])
    assert trajectory.reward == 1.0
    assert [message["content"] for message in trajectory.messages] == ["Guess 0-15.", "8", "lower", "3", "higher", "5"]
    assert trajectory.metrics == {"reward/won": 1.0, "turns": 3}
    assert len(engine.log) == 3


def test_their_limits_and_stops_end_an_episode_that_is_scored_all_the_same():
    params = {"env": {"player": {"max_turns": 2}, "hints": False}}
    environment = load_environment("verifiers:taskset-game", params)
    tasks = {task.id: task for split in ("train", "eval") for task in environment.tasks(split)}
    trajectory, engine = played(environment, tasks["secret-5"], ["8", "9"])
    assert (trajectory.reward, len(engine.log)) == (0.0, 2)
    assert [message["content"] for message in trajectory.messages][1:4] == ["8", "no", "9"]
    trajectory, engine = played(environment, tasks["secret-5"], ["I give up"])
    assert (trajectory.reward, len(engine.log)) == (0.0, 1)


def call(**arguments) -> str:
    return f"<tool_call>{json.dumps({'name': 'adder_add', 'arguments': arguments})}</tool_call>"


@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")  # of what they use
def test_tools_are_offered_called_in_their_process_and_their_answers_recorded_as_context():
    environment = load_environment("verifiers:taskset-tools")
    turns = ["<tool_call>{add</tool_call>", call(a="x", b=1), call(a=123, b=456), "It is 579."]
    trajectory, engine = played(environment, environment.tasks("train")[0], turns)
    assert trajectory.reward == 1.0
    assert trajectory.metrics["answers_of_tools"] == 3
    assert trajectory.metrics["tool_calls"] == 3
    assert trajectory.metrics["unreadable_tool_calls"] == 1
    assert "adder_add" in engine.prompts[0]
    assert "The sum of two numbers." in engine.prompts[0]
    tools = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert "invalid JSON" in tools[0]
    assert tools[2] == "579"


@pytest.mark.parametrize(
    ("name", "pick", "turns", "reward"),
    [
        ("verifiers:taskset-game", "secret-5", ["8", "5"], 1.0),
        ("verifiers:taskset-tools", "tool-3", [call(a=123, b=456), "It is 579."], 1.0),
    ],
)
def test_in_a_worker_it_is_the_same(name, pick, turns, reward):
    trajectory = played_in_a_worker(name, {}, pick, turns)
    assert trajectory.reward == reward
    assert trajectory.metrics["turns"] == 2


def test_what_goes_wrong_in_their_code_is_an_episode_that_failed_and_says_why():
    environment = sums(count=8, kind="crash")
    with pytest.raises(EpisodeFailed, match="no answer key") as failure:
        played(environment, environment.tasks("train")[0], ["6"])
    assert failure.value.kind == "raised"


def test_an_episode_that_is_cancelled_leaves_nothing_behind_and_the_next_one_is_played():
    environment = sums(count=8)
    task = environment.tasks("train")[0]

    class Silent(WrittenEngine):
        async def generate(self, *args, **kwargs):
            await asyncio.sleep(60)

    async def both():
        first = asyncio.create_task(episode(environment, task, Silent([])))
        await asyncio.sleep(0.5)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        lines = environment._theirs["served"].endpoint._lines
        assert lines == {}
        engine = WrittenEngine([str(2 * int(task.id.split()[1]))])
        return await episode(environment, task, engine)

    assert asyncio.run(both()).reward == 2.5


def test_a_conversation_too_long_for_the_context_costs_its_episode_by_its_own_name():
    environment = load_environment("verifiers:taskset-game", {"env": {"hints": False}})
    with pytest.raises(EpisodeFailed) as failure:
        played(environment, environment.tasks("train")[0], lambda prompt: "x" * 250)
    assert failure.value.kind == "context_full"


class Talks:
    """A Chat without an engine."""

    def __init__(self, *turns: AssistantTurn) -> None:
        self.turns, self.said, self.offered = list(turns), [], []

    def offer(self, tools) -> None:
        self.offered.append(tools)

    def say(self, *messages) -> None:
        self.said += messages

    async def reply(self, *, max_tokens=None, stop=()):
        return self.turns.pop(0)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HI = {"role": "user", "content": "hi"}


def test_harnesses_of_theirs_that_stream_are_answered_as_the_official_client_reads_it():
    calls = (ToolCall("add", {"a": 1}), ToolCall("", {}, "it is not JSON", "{a"))
    chat = Talks(AssistantTurn("let me see", False, calls), AssistantTurn("it is th", True))

    async def talk():
        endpoint = Endpoint()
        async with endpoint.serving():
            line = endpoint.line()
            line.add("session")
            headers = {SESSION: "session", SECRET: endpoint.secret}
            client = openai.AsyncOpenAI(base_url=endpoint.url, api_key="-", default_headers=headers, max_retries=0)
            create = client.chat.completions.create

            async def ask():
                heard = [chunk async for chunk in await create(model="m", messages=[HI], tools=[TOOL], stream=True)]
                first = {**heard[0].choices[0].delta.model_dump(exclude_none=True)}
                answers = [{"role": "tool", "tool_call_id": each["id"], "content": "2"} for each in first["tool_calls"]]
                return first, await create(model="m", messages=[HI, first, *answers], tools=[TOOL])

            asked = asyncio.create_task(ask())
            conversation = VerifiersConversation("t", [HI], chat)
            for _ in range(2):
                body, answer = await line.next()
                answer.set_result(await conversation.reply(body))
            done = await asked
            await client.close()
            return done

    first, second = asyncio.run(talk())
    assert first["content"] == "let me see"
    assert [call["function"]["arguments"] for call in first["tool_calls"]] == ['{"a": 1}', "{a"]
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("it is th", "length")
    assert [(message["role"], message["tool_call_id"]) for message in chat.said] == [
        ("tool", f"call_{n}") for n in (0, 1)
    ]
    assert chat.offered == [[TOOL]]


YES = {"role": "assistant", "content": "yes"}
PICTURE = {"role": "user", "content": [{"type": "image_url"}]}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"messages": [{"role": "user", "content": "hello"}]}, "another history"),
        ({"messages": [HI, {"role": "assistant", "content": "no"}, HI]}, "another history"),
        ({"messages": [HI, YES, YES]}, "another history"),
        ({"messages": [HI, YES, HI], "tools": [TOOL]}, "other tools"),
        ({"messages": [HI, YES, PICTURE]}, "something else than text"),
    ],
)
def test_a_history_that_was_changed_is_refused_and_not_recorded_wrongly(second, said):
    async def talk():
        conversation = VerifiersConversation(
            "t", [HI], Talks(AssistantTurn("yes", False), AssistantTurn("and?", False))
        )
        await conversation.reply({"messages": [HI]})
        await conversation.reply(second)

    with pytest.raises(EpisodeFailed, match=said):
        asyncio.run(talk())


def test_nobody_else_may_ask_the_endpoint():
    environment = sums(count=8)

    async def ask() -> list[int]:
        served = environment._theirs["served"]
        await served.ready()
        url = f"{served.endpoint.url}/chat/completions"
        async with httpx.AsyncClient() as client:
            bare = await client.post(url, json={})
            known = await client.post(url, json={}, headers={"X-Tandem-Secret": served.endpoint.secret})
        return [bare.status_code, known.status_code]

    assert asyncio.run(ask()) == [401, 404]


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("verifiers:taskset-pair", {}, r"it has 2 agents \(first, second\)"),
        ("verifiers:taskset-sums", {"taskset": {"kind": "silent"}}, "neither a prompt nor a system prompt"),
        ("verifiers:taskset-sums", {"task_set": {}}, "did you mean 'taskset'"),
        ("verifiers", {}, "environment.params.id: is missing"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(name, params, said):
    with pytest.raises(SpecError, match=said):
        load_environment(name, params)
