"""Play Gymnasium environments in text: an observation is a user message, the reply is the action.

    [environment]
    name = "gymnasium:FrozenLake-v1"       # or "gymnasium:package:Name-v0", which imports the package first

    [environment.params]
    observe = "render"
    actions = ["left", "down", "right", "up"]

A task is a seed of `reset`, so siblings have the same start. The episode's reward is the sum of its steps' rewards.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from tandem.env.builtin.split import check_params
from tandem.errors import EpisodeFailed, SpecError
from tandem.protocols import Chat
from tandem.types import Outcome, Task

_EVAL_SEED = 1_000_000
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURED = re.compile(r"\x1b\[((?:\d+;?)+)m(.*?)\x1b\[0m", re.DOTALL)


@dataclass(frozen=True)
class Gymnasium:
    id: str
    """The name after the colon, for `gymnasium.make`."""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of `gymnasium.make`."""
    tasks_train: int = 256
    """Number of seeds. Each is reset once before the run, for its first observation."""
    tasks_eval: int = 64
    max_steps: int = 32
    """Most replies in an episode; the environment may end it sooner."""
    observe: Literal["observation", "render"] = "observation"
    """What the model sees: the observation (text unchanged, other values as JSON), or the text picture of render_mode
    "ansi"."""
    actions: tuple[str, ...] = ()
    """Names of a Discrete space's actions, in order."""
    instruction: str = ""
    """Text before the first observation; when empty, a description of an action."""

    def __post_init__(self) -> None:
        check_params(self, tasks_train=(1, _EVAL_SEED), tasks_eval=(1, _EVAL_SEED), max_steps=(1, 10_000))
        if importlib.util.find_spec("gymnasium") is None:
            raise SpecError(f"environment.name = 'gymnasium:{self.id}': pip install 'tandem-rl[gymnasium]'")
        with closing(self._make()) as game:
            self._check_actions(game.action_space)

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in ("train", "eval"):
            raise SpecError(f"split = '{split}': an environment has 'train' and 'eval'")
        first, count = (0, self.tasks_train) if split == "train" else (_EVAL_SEED, self.tasks_eval)
        with closing(self._make()) as game:
            return [self._task(game, first + number) for number in range(count)]

    def _task(self, game: Any, seed: int) -> Task:
        observation, _ = game.reset(seed=seed)
        asked = self.instruction or _how_to_act(game.action_space, self.actions)
        shown = self._shown(game, observation)
        opening = {"role": "user", "content": f"{asked}\n\n{shown}"}
        return Task(f"{self.id}-{seed}", (opening,), {"seed": seed, "shown": shown})

    async def run(self, task: Task, chat: Chat) -> Outcome:
        with closing(self._make()) as game:
            observation, info = game.reset(seed=task.payload["seed"])
            if self._shown(game, observation) != task.payload["shown"]:
                text = f"reset(seed={task.payload['seed']}) gave another start than before; equal seeds must agree"
                raise EpisodeFailed("raised", f"task {task.id}: {text}")
            reward, steps, unreadable, ended = 0.0, 0, 0, False
            for turn in range(self.max_steps):
                action, problem = self._read((await chat.reply()).text, game.action_space)
                if problem:
                    unreadable += 1
                    answer = problem
                else:
                    observation, gained, terminated, truncated, info = game.step(action)
                    steps, reward, ended = steps + 1, reward + float(gained), terminated or truncated
                    answer = self._shown(game, observation)
                if ended:
                    break
                if turn + 1 < self.max_steps:
                    chat.say(answer)
        told = {"steps": float(steps), "ended": float(ended), "unreadable_actions": float(unreadable)}
        return Outcome(reward, {**_numbers(info), **told})

    def _make(self) -> Any:
        library: Any = importlib.import_module("gymnasium")
        mode = {"render_mode": "ansi"} if self.observe == "render" else {}
        return library.make(self.id, disable_env_checker=True, **{**mode, **self.kwargs})

    def _shown(self, game: Any, observation: Any) -> str:
        return _plain_colours(str(game.render())) if self.observe == "render" else _text(observation)

    def _check_actions(self, space: Any) -> None:
        if self.actions and not (isinstance(space, _spaces().Discrete) and space.n == len(self.actions)):
            raise SpecError(f"environment.params.actions: {len(self.actions)} names, but the action space is {space}")

    def _read(self, reply: str, space: Any) -> tuple[Any, str]:
        """Read an action from a reply; return it, or what is wrong with the reply."""
        if isinstance(space, _spaces().Text):
            read: Callable[[str], Any] = str.strip
        elif isinstance(space, _spaces().Discrete):
            read = self._discrete
        else:
            read = lambda text: space.from_jsonable([json.loads(text)])[0]  # noqa: E731
        try:
            action = read(reply)
            if space.contains(action):
                return action, ""
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
            pass
        return None, f"This is no action. {_how_to_act(space, self.actions)}"

    def _discrete(self, reply: str) -> int:
        """Return the action of the last action name, or of the last number, in a reply."""
        if self.actions:
            number_of = {name.lower(): number for number, name in enumerate(self.actions)}
            longest_first = sorted(map(re.escape, number_of), key=len, reverse=True)
            found = re.findall(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", reply.lower())
            return number_of[found[-1]]
        return int(re.findall(r"-?\d+", reply)[-1])


def _spaces() -> Any:
    return importlib.import_module("gymnasium.spaces")


def _how_to_act(space: Any, names: Sequence[str]) -> str:
    if names:
        return f"Answer with one action: {', '.join(names)}."
    if isinstance(space, _spaces().Discrete):
        return f"Answer with one action, a number from {space.start} to {space.start + space.n - 1}."
    if isinstance(space, _spaces().Text):
        return f"Answer with {space.min_length} to {space.max_length} characters."
    return f"Answer with an action as JSON, out of {space}."


def _text(observation: Any) -> str:
    return observation if isinstance(observation, str) else json.dumps(_plain(observation), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Convert numpy values to values that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("list[Any]", value)]
    return value.tolist() if hasattr(value, "tolist") else value


def _plain_colours(picture: str) -> str:
    """Write terminal colours as words, `[yellow: ]`: in some environments a colour marks the player's position."""

    def named(found: re.Match[str]) -> str:
        codes = [int(code) for code in found[1].split(";") if code]
        colour = next((_COLOURS[code % 10] for code in codes if code // 10 in (3, 4) and code % 10 < 8), "")
        return f"[{colour}:{found[2]}]" if colour else found[2]

    return _COLOURED.sub(named, picture).strip("\n")


def _numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers in the last step's info."""
    found: dict[str, float] = {}
    for key, value in info.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if not isinstance(value, str) and math.isfinite(number):
            found[f"info/{key}"] = number
    return found
