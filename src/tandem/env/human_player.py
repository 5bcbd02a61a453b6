"""`tandem env try NAME`: play one episode with a person in the model's place."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.env.builtin.split import SPLITS
from tandem.env.load import load_environment
from tandem.env.outcome_check import checked
from tandem.env.scripted_chat import ScriptedReply
from tandem.errors import EpisodeFailed, SpecError
from tandem.io.image_parts import has_images, interned
from tandem.io.image_store import SCHEME, ImageStore
from tandem.io.tool_calls import parse_calls
from tandem.spec.load import load_spec
from tandem.spec.package_names import is_package
from tandem.types import Message, Outcome, text_of


class HumanChat:
    """A Chat whose replies a person types."""

    def __init__(self, ask: Callable[[str], str], tell: Callable[[str], Any], store: ImageStore | None = None) -> None:
        """`store`: where the person can open images; None refuses them."""
        self._ask = ask
        self._tell = tell
        self._images = store
        self._offers = False

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._offers = True
        for tool in tools:
            told = tool.get("function", tool)
            self._tell(f"{'tool':>9}> {told.get('name')}: {told.get('description', '')}")
        example = json.dumps({"name": "...", "arguments": {}})
        self._tell(f"{'':>9}  call a tool by <tool_call>{example}</tool_call>")

    def say(self, *messages: Message | str) -> None:
        for message in messages:
            spoken: Message = {"role": "user", "content": message} if isinstance(message, str) else message
            if has_images([spoken]):
                (spoken,) = interned([spoken], self._images, "the message")
                assert self._images is not None, "interned() has refused images"
                digests = [part["image"].removeprefix(SCHEME) for part in spoken["content"] if part["type"] == "image"]
                for digest in digests:
                    self._tell(f"{'image':>9}> {self._images.directory / digest}")
            self._tell(f"{spoken['role']:>9}> {text_of(spoken['content'])}")

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> ScriptedReply:
        try:
            text = self._ask(f"{'you':>9}> ")
        except EOFError as error:
            raise EpisodeFailed("raised", "the input ended before the episode did") from error
        cut = min((text.find(mark) for mark in stop if mark in text), default=len(text))
        said, calls = parse_calls(text[:cut]) if self._offers else (text[:cut], [])
        return ScriptedReply(said, tool_calls=calls)

    async def judge(self, messages: Sequence[Message], *, max_tokens: int = 512) -> str:
        self.say(*messages)
        try:
            return self._ask(f"{'judge':>9}> ")
        except EOFError as error:
            raise EpisodeFailed("raised", "the input ended before the judge's answer") from error


def _of_spec(path: str | Path, changes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    environment = getattr(load_spec(path), "environment", None)
    if environment is None:
        raise SpecError(f"{path}: has no [environment] to play; name a spec of recipe = 'rl', or an environment")
    if environment.sandbox != "off" and not is_package(environment.name):  # those are refused when they are loaded
        raise SpecError(
            f"environment.sandbox = '{environment.sandbox}': an environment is tried in this process, outside of it; "
            f"if you trust it, name it instead of the spec: `tandem env try {environment.name}`"
        )
    return environment.name, {**environment.params, **changes}


def try_environment(
    name: str | Path,
    params: Mapping[str, Any] | None = None,
    *,
    split: str = "eval",
    index: int = 0,
    ask: Callable[[str], str] = input,
    tell: Callable[[str], object] = print,
) -> Outcome:
    """Play one task of an environment, or of the one that a spec's file has.

    The environment's exceptions are raised unchanged, with their traceback."""
    if split not in SPLITS:
        raise SpecError(f"split = '{split}': an environment has {' and '.join(map(repr, SPLITS))}")
    if str(name).endswith(".toml"):
        name, params = _of_spec(name, params or {})
    environment = load_environment(name, params)
    tasks = environment.tasks(split)
    if not 0 <= index < len(tasks):
        raise SpecError(f"index = {index}: '{split}' of '{name}' has tasks 0 to {len(tasks) - 1}")
    with tempfile.TemporaryDirectory(prefix="tandem-images-") as images:
        chat = HumanChat(ask, tell, ImageStore(Path(images)))
        chat.say(*tasks[index].messages)
        outcome = asyncio.run(environment.run(tasks[index], chat))
    reward, metrics = checked(tasks[index].id, outcome)
    told = "".join(f"  {key} {value:g}" for key, value in metrics.items())
    tell(f"{'reward':>9}> {reward:g}{told}")
    return outcome
