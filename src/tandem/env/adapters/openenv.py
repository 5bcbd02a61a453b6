"""Play OpenEnv environments on an OpenEnv server, by its own WebSocket client, with one session per episode.

    [environment]
    name = "openenv:http://127.0.0.1:8000"

    [environment.params]
    observe = ["echoed_message"]           # shown as text; when empty, the whole observation as JSON
    action = "message"                     # the field that holds the reply; when empty, the reply is the action as JSON

A task is a set of arguments of `reset`, by default a seed. The reward is the sum of the steps' rewards.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from tandem.env.builtin.split import check_params
from tandem.errors import EnvironmentFailed, SpecError
from tandem.protocols import Chat
from tandem.types import Outcome, Task

_EVAL_SEED = 1_000_000
_SCHEMA_S = 10.0
_REFUSED = "VALIDATION_ERROR"  # their client raises a RuntimeError with this text


@dataclass(frozen=True)
class OpenEnv:
    id: str
    """The server's address: the part after the colon."""
    observe: tuple[str, ...] = ()
    """Fields of the observation to show, as text; when empty, all except `metadata`, as JSON."""
    action: str = ""
    """The action's field that takes the whole reply; when empty, the reply must be an action as JSON."""
    instruction: str = ""
    """Text before the first observation; when empty, a description of an action."""
    tasks_train: int = 256
    tasks_eval: int = 64
    resets: tuple[dict[str, Any], ...] = ()
    """Arguments of `reset`, one task each, instead of seeds; at least two. One in eight is held out."""
    seeded: bool = True
    """Whether `reset` gets the task's seed, where `resets` is empty."""
    max_steps: int = 32
    timeout_s: float = 60.0
    """Timeout of each answer of the server."""

    def __post_init__(self) -> None:
        check_params(self, tasks_train=(1, _EVAL_SEED), tasks_eval=(1, _EVAL_SEED), max_steps=(1, 10_000))
        name = f"environment.name = 'openenv:{self.id}'"
        if importlib.util.find_spec("openenv") is None:
            raise SpecError(f"{name}: pip install 'tandem-rl[openenv]'")
        importlib.import_module("openenv.core")  # takes seconds, which must not count against an episode
        if urllib.parse.urlsplit(self.id).scheme not in ("http", "https", "ws", "wss"):
            raise SpecError(f"{name}: write the server's address, as in openenv:http://127.0.0.1:8000")
        if len(self.resets) == 1:
            raise SpecError("environment.params.resets: has one entry; 'train' and 'eval' need one each")
        self._check_fields("action", [self.action] if self.action else [])
        self._check_fields("observe", self.observe)

    def _check_fields(self, parameter: str, names: Sequence[str]) -> None:
        kind = "action" if parameter == "action" else "observation"
        known = _schema(self.id, kind)["properties"]
        if unknown := [name for name in names if name not in known]:
            listed = ", ".join(known)
            raise SpecError(f"environment.params.{parameter}: {kind}s have no field {unknown[0]}; there are: {listed}")

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in ("train", "eval"):
            raise SpecError(f"split = '{split}': an environment has 'train' and 'eval'")
        asked = self.instruction or self._how_to_act()
        opening = ({"role": "user", "content": asked},)
        return [Task(f"{split}-{number}", opening, {"reset": reset}) for number, reset in self._resets(split)]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        client: Any = importlib.import_module("openenv.core").GenericEnvClient
        reward, steps, unreadable = 0.0, 0, 0
        async with client(base_url=self.id, message_timeout_s=self.timeout_s) as game:
            result = await game.reset(**task.payload["reset"])
            shown = self._shown(result.observation)
            for _ in range(self.max_steps):
                if result.done:
                    break
                chat.say(shown)
                action, shown = self._read((await chat.reply()).text)
                if action is None:
                    unreadable += 1
                    continue
                try:
                    result = await game.step(action)
                except RuntimeError as error:
                    if _REFUSED not in str(error):
                        raise
                    unreadable, shown = unreadable + 1, f"This is no action. {self._how_to_act()}"
                    continue
                steps, reward = steps + 1, reward + float(result.reward or 0.0)
                shown = self._shown(result.observation)
        told = {"steps": float(steps), "ended": float(result.done), "unreadable_actions": float(unreadable)}
        return Outcome(reward, told)

    def _resets(self, split: str) -> list[tuple[int, dict[str, Any]]]:
        if self.resets:
            held_out = max(1, len(self.resets) // 8)
            numbered = list(enumerate(self.resets))
            return numbered[-held_out:] if split == "eval" else numbered[:-held_out]
        first, count = (0, self.tasks_train) if split == "train" else (_EVAL_SEED, self.tasks_eval)
        return [(number, {"seed": number} if self.seeded else {}) for number in range(first, first + count)]

    def _how_to_act(self) -> str:
        if self.action:
            field_of = _schema(self.id, "action")["properties"][self.action]
            return f"Each answer of yours is an action: {field_of.get('description') or self.action}."
        shown = {
            key: value
            for key, value in _schema(self.id, "action").items()
            if key in ("properties", "required", "$defs")
        }
        return f"Answer with an action, as JSON of this schema and nothing else:\n{json.dumps(shown)}"

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if not self.observe:
            shown = {key: value for key, value in observation.items() if key != "metadata"}
            return json.dumps(shown, ensure_ascii=False)
        values = [observation.get(each) for each in self.observe]
        return "\n".join(each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values)

    def _read(self, reply: str) -> tuple[dict[str, Any] | None, str]:
        """Read an action from a reply; return it, or what is wrong with the reply. The server checks its fields."""
        if self.action:
            kind = _schema(self.id, "action")["properties"][self.action].get("type", "string")
            if kind == "string":
                return {self.action: reply}, ""
            try:
                return {self.action: json.loads(reply)}, ""
            except (ValueError, RecursionError):
                return None, f"This is no action: {self.action} is written as JSON, of type {kind}."
        text = reply.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
        try:
            action = json.loads(text)
        except (ValueError, RecursionError) as error:
            return None, f"This is no JSON: {error}. {self._how_to_act()}"
        if not isinstance(action, dict):
            return None, f"This is no JSON object. {self._how_to_act()}"
        return cast("dict[str, Any]", action), ""


@lru_cache(maxsize=16)
def _schema(url: str, kind: str) -> dict[str, Any]:
    """Return the server's schema of an action or observation."""
    place = urllib.parse.urlsplit(url.rstrip("/") + "/schema")
    place = place._replace(scheme={"ws": "http", "wss": "https"}.get(place.scheme, place.scheme))
    try:
        with urllib.request.urlopen(place.geturl(), timeout=_SCHEMA_S) as response:
            schema = json.load(response)[kind]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentFailed(f"environment.name = 'openenv:{url}': {place.geturl()}: {error}") from error
    theirs = ("metadata", "done", "reward")  # fields of every OpenEnv type
    return {**schema, "properties": {key: each for key, each in schema["properties"].items() if key not in theirs}}
