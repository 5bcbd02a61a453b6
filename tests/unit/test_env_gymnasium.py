"""The Gymnasium adapter, with real toy_text environments and a text environment defined here."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from written_chat import WrittenChat

from tandem.env.load import load_environment
from tandem.errors import EpisodeFailed, SpecError
from tandem.types import Outcome

gymnasium = pytest.importorskip("gymnasium", reason="not installed: pip install 'tandem-rl[gymnasium]'")

SMALL = {"tasks_train": 6, "tasks_eval": 2}


class Echo(gymnasium.Env):
    """Says a word, is told it backwards, three times; a wrong one ends it."""

    observation_space = gymnasium.spaces.Text(40)
    action_space = gymnasium.spaces.Text(12, charset="abcdefghijklmnopqrstuvwxyz")
    closed = 0

    def __init__(self, bonus: float = 0.0, forgetful: bool = False) -> None:
        self.bonus, self.forgetful, self.turn, self.word = bonus, forgetful, 0, ""

    def _next(self) -> str:
        self.word = "".join(self.np_random.choice(list("abcdef"), size=4))
        return f"backwards: {self.word}"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=None if self.forgetful else seed)
        self.turn = 0
        return self._next(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action == self.word[::-1]
        self.turn += 1
        return self._next(), right + self.bonus, not right, self.turn == 3, {"turn": self.turn, "word": self.word}

    def close(self) -> None:
        Echo.closed += 1


gymnasium.register("TandemEcho-v0", entry_point=Echo)


def played(environment: Any, turns: Any, split: str = "train", index: int = 0) -> tuple[Outcome, WrittenChat]:
    task = environment.tasks(split)[index]
    chat = WrittenChat(turns, [dict(message) for message in task.messages])
    return asyncio.run(environment.run(task, chat)), chat


def backwards(shown: str) -> str:
    return f" {shown.rpartition(': ')[2][::-1]}\n"


def test_a_text_environment_is_a_conversation_and_its_rewards_are_summed():
    environment = load_environment("gymnasium:TandemEcho-v0", {**SMALL, "kwargs": {"bonus": 0.25}})
    before = Echo.closed
    outcome, chat = played(environment, backwards)
    assert outcome.reward == 3.75
    assert outcome.metrics == {"steps": 3, "ended": 1, "unreadable_actions": 0, "info/turn": 3}
    assert [message["role"] for message in chat.heard] == ["user"] * 3
    assert chat.heard[0]["content"].startswith("Answer with 1 to 12 characters.\n\nbackwards: ")
    assert Echo.closed - before == 2  # of tasks(), and of the episode


def test_a_wrong_action_ends_it_when_the_environment_says_so_and_one_that_is_none_is_told():
    environment = load_environment("gymnasium:TandemEcho-v0", SMALL)
    assert played(environment, ["zzzz"])[0].reward == 0
    outcome, chat = played(environment, ["what do you mean?", "", "zzzz"])
    assert outcome.metrics["unreadable_actions"] == 2
    assert outcome.metrics["steps"] == 1
    assert chat.heard[1]["content"] == "This is no action. Answer with 1 to 12 characters."


def test_an_episode_ends_after_max_steps_replies_whatever_they_were():
    environment = load_environment("gymnasium:TandemEcho-v0", {**SMALL, "max_steps": 2})
    outcome, chat = played(environment, backwards)
    assert (outcome.reward, outcome.metrics["ended"], chat.replies, len(chat.heard)) == (2, 0, 2, 2)
    outcome, chat = played(environment, ["?", "?"])
    assert (outcome.reward, chat.replies, len(chat.heard)) == (0, 2, 2)


def test_tasks_are_seeds_so_siblings_start_alike_and_splits_do_not():
    environment = load_environment("gymnasium:TandemEcho-v0", SMALL)
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert (len(train), len(held_out)) == (6, 2)
    assert train == environment.tasks("train")
    assert len({task.messages[0]["content"] for task in (*train, *held_out)}) == 8
    assert train[0].id == "TandemEcho-v0-0"


def test_an_environment_whose_seeds_do_not_decide_is_found_out():
    environment = load_environment("gymnasium:TandemEcho-v0", {**SMALL, "kwargs": {"forgetful": True}})
    with pytest.raises(EpisodeFailed, match="equal seeds must agree"):
        played(environment, backwards)


LAKE = {**SMALL, "observe": "render", "actions": ["left", "down", "right", "up"], "kwargs": {"is_slippery": False}}


def test_frozen_lake_is_drawn_in_letters_and_walked_by_words():
    environment = load_environment("gymnasium:FrozenLake-v1", LAKE)
    path = ["I go Down.", "down!", "right", "right", "not left, but down", "RIGHT"]
    outcome, chat = played(environment, path)
    assert outcome.reward == 1.0
    assert outcome.metrics["steps"] == 6
    assert chat.heard[0]["content"] == "Answer with one action: left, down, right, up.\n\n[red:S]FFF\nFHFH\nFFFH\nHFFG"
    assert "[red:F]" in chat.heard[1]["content"]
    assert played(environment, ["right", "down"])[0].reward == 0.0  # into the hole


def test_taxi_is_played_by_numbers_and_its_picture_tells_where_the_taxi_is():
    environment = load_environment("gymnasium:Taxi-v4", {**SMALL, "observe": "render", "max_steps": 3})
    outcome, chat = played(environment, ["action 0", "4", "99"])
    assert outcome.reward == -11.0  # a step, and a pick-up where nobody waits
    assert outcome.metrics["unreadable_actions"] == 1
    assert "a number from 0 to 5" in chat.heard[0]["content"]
    assert "[yellow: ]" in chat.heard[0]["content"]
    assert "\x1b" not in json.dumps(chat.heard, ensure_ascii=False)


def test_blackjack_s_observation_is_shown_as_json():
    environment = load_environment("gymnasium:Blackjack-v1", SMALL)
    outcome, chat = played(environment, lambda shown: "1" if json.loads(shown.split("\n")[-1])[0] < 17 else "0")
    assert outcome.reward in (-1.0, 0.0, 1.0)
    assert outcome.metrics["ended"] == 1
    assert len(json.loads(chat.heard[0]["content"].split("\n")[-1])) == 3


class Pair(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict({"at": gymnasium.spaces.Box(-1, 1, (2,))})
    action_space = gymnasium.spaces.MultiDiscrete([3, 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample() | {"at": gymnasium.spaces.Box(-1, 1, (2,)).low}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.reset()[0], float(sum(action)), True, False, {"good": True, "nan": float("nan")}


gymnasium.register("TandemPair-v0", entry_point=Pair)


def test_other_spaces_are_written_as_json():
    environment = load_environment("gymnasium:TandemPair-v0", SMALL)
    outcome, chat = played(environment, ["[9, 9]", '{"a": 1}', "null", "[2, 1]"])
    assert outcome.reward == 3.0
    assert outcome.metrics == {"steps": 1, "ended": 1, "unreadable_actions": 3, "info/good": 1.0}
    assert chat.heard[0]["content"].endswith('{"at": [-1.0, -1.0]}')


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("gymnasium:Blackjack-v1", {"actions": ["stick"]}, "1 names, but the action space is Discrete"),
        ("gymnasium:Blackjack-v1", {"id": "x"}, "environment.name = 'gymnasium:Blackjack-v1' sets it"),
        ("gymnasium", {}, "environment.params.id: is missing"),
        ("gymnasium:FrozenLake-v1", {"observe": "picture"}, "environment.params.observe"),
        ("gymnasium:FrozenLake-v1", {"max_step": 3}, "did you mean 'max_steps'"),
        ("gymnasium:FrozenLake-v1", {"max_steps": 0}, "choose between 1 and"),
        ("gymnasim:FrozenLake-v1", {}, "no module 'gymnasim'"),
    ],
)
def test_what_is_wrong_is_named(name, params, said):
    with pytest.raises(SpecError, match=said):
        load_environment(name, params)
