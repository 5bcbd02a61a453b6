"""OpenEnv, against a server of its own kind: a real process, its client, its WebSocket."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded import WrittenEngine, episode, exact, played, played_in_a_worker

from tandem.env.load import load_environment
from tandem.errors import EnvironmentFailed, EpisodeFailed, SpecError

pytest.importorskip("openenv", reason="openenv is not installed here: make test-adapters")

TEXT = {"observe": ["prompt"], "action": "message", "tasks_train": 8, "tasks_eval": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("server") / "port"
    process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("echo_server.py")), str(place)])
    deadline = time.monotonic() + 60
    while not place.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield f"http://127.0.0.1:{place.read_text()}"
    process.terminate()
    process.wait(20)


def backwards(prompt: str) -> str:
    return prompt.rpartition("backwards: ")[2][:4][::-1]


def test_text_goes_to_and_fro_and_the_rewards_are_summed(server):
    environment = load_environment(f"openenv:{server}", TEXT)
    task = environment.tasks("train")[3]
    trajectory, engine = played(environment, task, backwards)
    assert trajectory.reward == 3.0
    assert trajectory.metrics == {"steps": 3, "ended": 1, "unreadable_actions": 0}
    assert len(engine.log) == 3
    said = [message["content"] for message in trajectory.messages if message["role"] == "user"]
    assert said[0] == "Each answer of yours is an action: message."
    assert len(said) == 4
    assert all(text.startswith("backwards: ") for text in said[1:])
    assert played(environment, task, ["x", "y", "z"])[0].reward == 0.0


def test_a_task_is_a_seed_so_siblings_meet_the_same_words(server):
    environment = load_environment(f"openenv:{server}", TEXT)
    first, again = (played(environment, environment.tasks("train")[1], backwards)[0] for _ in range(2))
    other = played(environment, environment.tasks("eval")[1], backwards)[0]
    assert first.messages == again.messages != other.messages
    assert (len(environment.tasks("train")), len(environment.tasks("eval"))) == (8, 2)


def test_actions_as_json_and_what_is_none_is_told_and_not_the_end(server):
    environment = load_environment(f"openenv:{server}", {"tasks_train": 2, "tasks_eval": 1, "max_steps": 5})
    written: list[str] = ["hm", "[1]", '{"massage": "x"}']

    def act(prompt: str) -> str:
        done = len(engine_log(prompt))
        if done < 3:
            return written[done]
        word = prompt.rpartition("backwards: ")[2][:4][::-1]
        return f"```json\n{json.dumps({'message': word, 'times': 2})}\n```"

    def engine_log(prompt: str) -> list[str]:
        return prompt.split("<|assistant|>")[1:-1]

    trajectory, engine = played(environment, environment.tasks("train")[0], act)
    assert trajectory.metrics == {"steps": 2, "ended": 0, "unreadable_actions": 3}
    assert trajectory.reward == 4.0
    assert '"times"' in engine.prompts[0]
    told = [message["content"] for message in trajectory.messages if message["role"] == "user"]
    assert json.loads(told[1]).keys() == {"prompt", "turn"}
    assert told[2].startswith("This is no JSON: ")
    assert told[3].startswith("This is no JSON object.")
    assert told[4].startswith("This is no action. Answer with an action, as JSON of this schema")


def test_resets_of_your_own_are_the_tasks(server):
    resets = [{"seed": n, "turns": n % 2 + 1} for n in range(10)]
    environment = load_environment(f"openenv:{server}", {**TEXT, "resets": resets})
    assert [task.id for task in environment.tasks("eval")] == ["eval-9"]
    assert len(environment.tasks("train")) == 9
    assert len(played(environment, environment.tasks("train")[0], backwards)[1].log) == 1
    assert len(played(environment, environment.tasks("train")[1], backwards)[1].log) == 2


def test_sessions_are_apart_when_many_play_at_once(server):
    environment = load_environment(f"openenv:{server}", TEXT)

    async def all_of_them():
        tasks, engines = environment.tasks("train"), [WrittenEngine(backwards) for _ in range(8)]
        done = await asyncio.gather(
            *(episode(environment, task, engine) for task, engine in zip(tasks, engines, strict=True))
        )
        return done, engines

    for trajectory, engine in zip(*asyncio.run(all_of_them()), strict=True):
        exact(trajectory, engine)
        assert trajectory.reward == 3.0


def test_in_a_worker_it_is_the_same(server):
    assert played_in_a_worker(f"openenv:{server}", TEXT, "train-2", backwards).reward == 3.0


def test_an_environment_that_raises_fails_the_episode_by_what_it_said(server):
    environment = load_environment(f"openenv:{server}", TEXT)
    with pytest.raises(EpisodeFailed, match="told to"):
        played(environment, environment.tasks("train")[0], ["crash"])


def test_what_cannot_be_played_is_refused(server):
    with pytest.raises(SpecError, match=r"params\.action: actions have no field text; there are: message, times"):
        load_environment(f"openenv:{server}", {"action": "text"})
    with pytest.raises(SpecError, match="write the server's address"):
        load_environment("openenv:echo")
    with pytest.raises(SpecError, match="one is too few"):
        load_environment(f"openenv:{server}", {"resets": [{}]})
    with pytest.raises(EnvironmentFailed, match="/schema: "):
        load_environment("openenv:http://127.0.0.1:9")
    with pytest.raises(SpecError, match=r"params\.observe: observations have no field text; there are: prompt, turn"):
        load_environment(f"openenv:{server}", {**TEXT, "observe": ["text"]})
