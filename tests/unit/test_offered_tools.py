"""Demonstrations of an environment with tools are rendered with the tools that an episode offers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.env.scripted_chat import calls_tools, offered_tools
from tandem.env.tools import Tools
from tandem.rollout.recorded_producer import record
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Outcome, Task


def stock(item: str) -> int:
    """Items left."""
    return len(item)


TASK = Task("tam", ({"role": "user", "content": "stock of tam"},))
CALL = {"type": "function", "function": {"name": "stock", "arguments": {"item": "tam"}}}
SHOWN = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "stock", "content": "3"},
    {"role": "assistant", "content": "3"},
]


class Offers:
    tools = Tools(stock)

    def tasks(self, split: str) -> list[Task]:
        return [TASK]

    async def run(self, task: Task, chat: Any) -> Outcome:
        chat.offer(self.tools.schemas)
        return Outcome(float((await self.tools.play(chat)).text == "3"))


class Raises(Offers):
    async def run(self, task: Task, chat: Any) -> Outcome:
        await super().run(task, chat)
        raise ValueError("it cannot read an empty reply")


class Endless(Offers):
    async def run(self, task: Task, chat: Any) -> Outcome:
        while True:
            await super().run(task, chat) if not hasattr(self, "asked") else await chat.reply()
            self.asked = True


class Plain(Offers):
    async def run(self, task: Task, chat: Any) -> Outcome:
        return Outcome(float((await chat.reply()).text == "3"))


@pytest.mark.parametrize("environment", [Offers(), Raises(), Endless()], ids=["offers", "raises", "endless"])
def test_tools_are_found_however_an_episode_of_empty_replies_ends(environment: Any):
    (tool,) = asyncio.run(offered_tools(environment, TASK, 5.0))
    assert tool["function"]["name"] == "stock"


def test_an_environment_without_tools_offers_none():
    assert asyncio.run(offered_tools(Plain(), TASK, 5.0)) == []
    assert (calls_tools(SHOWN), calls_tools(SHOWN[2:])) == (True, False)


def test_a_demonstration_begins_as_its_episode_does():
    renderer = Renderer(byte_tokenizer())
    tools = asyncio.run(offered_tools(Offers(), TASK, 5.0))
    recorded = record(renderer, [*TASK.messages, *SHOWN], TASK.id, tools)
    opening = renderer.prompt(TASK.messages, tools)
    assert recorded.ids[: len(opening)] == opening
    assert not any(recorded.trained[: len(opening)])
    assert recorded.trained[len(opening)]
    assert len(opening) > len(renderer.prompt(TASK.messages)) + 100
