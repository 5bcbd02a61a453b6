"""An OpenEnv server of our own: says a word's letters, wants them backwards. `python echo_server.py PORT_FILE`"""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class EchoAction(Action):
    message: str
    """What is said."""
    times: int = 1


class EchoObservation(Observation):
    prompt: str
    turn: int


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._word, self._wanted = State(), "", 3

    def reset(self, seed: int | None = None, episode_id: str | None = None, turns: int = 3, **_: Any) -> Observation:
        self._rng, self._wanted = random.Random(seed), turns
        self._state = State(episode_id=episode_id, step_count=0)
        return self._next(None)

    def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> Observation:
        if action.message == "crash":
            raise ValueError("told to")
        self._state.step_count += 1
        return self._next(action.times * float(action.message == self._word[::-1]))

    def _next(self, reward: float | None) -> Observation:
        self._word = "".join(self._rng.choices("abcdef", k=4))
        turn = self._state.step_count
        return EchoObservation(prompt=f"backwards: {self._word}", turn=turn, reward=reward, done=turn == self._wanted)

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=16)

if __name__ == "__main__":
    sock = socket.create_server(("127.0.0.1", 0))
    place = Path(sys.argv[1])
    place.with_suffix(".tmp").write_text(str(sock.getsockname()[1]))
    place.with_suffix(".tmp").rename(place)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])
