"""A worker process: run an environment's episodes, one at a time, with a Chat over a socket."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import json
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tandem.env import resource_limits
from tandem.env.expected import expected_of
from tandem.env.outcome_check import checked
from tandem.env.worker_messages import FAILURE_KINDS, MAX_TEXT
from tandem.errors import EpisodeFailed, ImageError, TemplateError
from tandem.io import json_frames
from tandem.io.image_parts import portable
from tandem.protocols import Demonstrator, Environment
from tandem.types import Message, Task, ToolCall

_PAGE_CHARS = 2**20
_MOST_TASKS = 1_000_000


@dataclass
class LoadedEnvironment:
    """An environment and the splits of tasks loaded so far."""

    environment: Environment
    name: str
    episode_timeout_s: float
    _splits: dict[str, Sequence[Task]] = field(default_factory=dict[str, Sequence[Task]])

    def task(self, split: str, index: int, task_id: str) -> Task:
        found = self.tasks(split)[index]
        if found.id != task_id:
            text = (
                f"tasks('{split}')[{index}] is '{found.id}' now, but was '{task_id}'; return the same tasks each time"
            )
            raise EpisodeFailed("raised", text)
        return found

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._splits:
            self._splits[split] = self.environment.tasks(split)
        return self._splits[split]


@dataclass(frozen=True, slots=True)
class ToldReply:
    """A reply of the policy, received from the process that plays."""

    text: str
    truncated: bool
    tool_calls: Sequence[ToolCall]


class FarChat:
    """A Chat that sends text to the process that plays, which records it, and receives text back."""

    def __init__(self, writer: asyncio.StreamWriter, given: dict[str, Any] | None = None) -> None:
        """`given`: the first reply, which the process that plays has asked for already."""
        self._writer, self._given = writer, given
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.said: list[Message] = []
        self.over = False
        """Whether the episode has ended; leftover tasks then send nothing more."""

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._send({"op": "offer", "tools": list(tools)})

    def say(self, *messages: Message | str) -> None:
        for message in messages:
            plain = {"role": "user", "content": message} if isinstance(message, str) else message
            self.said += portable([plain], "a message")

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> ToldReply:
        if (message := self._given) is not None:
            self._given = None
            if self.said or max_tokens is not None or stop:
                text = "an environment with replies_first asks for its first reply at once, without arguments"
                raise EpisodeFailed("raised", text)
        else:
            ask = {"op": "reply", "said": self.said, "max_tokens": max_tokens, "stop": list(stop)}
            self.said = []  # the other process has it, even if the reply fails
            message = await self._ask(ask)
        return ToldReply(
            message["text"], message["truncated"], tuple(ToolCall(**call) for call in message["tool_calls"])
        )

    async def judge(self, messages: Sequence[Message], *, max_tokens: int = 512) -> str:
        asked = portable(messages, "a judge's message")
        return (await self._ask({"op": "judge", "messages": asked, "max_tokens": max_tokens}))["text"]

    def receive(self, message: dict[str, Any]) -> None:
        waiting = self._waiting.pop(message["id"], None)
        if waiting is None or waiting.done():
            return
        if message["op"] == "wrong":
            text = message["text"]
            template = message["kind"] == "template"
            waiting.set_exception(TemplateError(text) if template else EpisodeFailed(message["kind"], text))
        else:
            waiting.set_result(message)

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self.over:
            raise EpisodeFailed("raised", "the environment used the chat after the episode had ended")
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send({**question, "id": number})
        try:
            return await answer
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None:
                self._send({"op": "forget", "id": number})
            raise

    def _send(self, value: dict[str, Any]) -> None:
        if not self.over:
            self._writer.write(json_frames.pack(value))


def work(sock: socket.socket, loaded: LoadedEnvironment) -> None:
    """Serve until the other end closes, then exit without the fork server's exit handlers."""
    faulthandler.enable()
    gc.freeze()  # loaded objects share memory with the fork server until written to
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    try:
        asyncio.run(_serve(sock, loaded))
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
    os._exit(0)


async def _serve(sock: socket.socket, loaded: LoadedEnvironment) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    episode: asyncio.Task[None] | None = None
    chat = FarChat(writer)
    heard = json_frames.Reader(reader)
    while frame := await heard.read():
        message: dict[str, Any] = json.loads(frame)
        match message["op"]:
            case "play":
                chat = FarChat(writer, message.get("given"))
                resource_limits.limit_cpu(loaded.episode_timeout_s)
                episode = asyncio.create_task(_play(loaded, chat, writer, message))
            case "cancel":
                if episode is not None:
                    episode.cancel()
            case "tasks":
                _send_tasks(loaded, writer, message)
            case "demonstrate":
                _send_demonstration(loaded, writer, message)
            case _:
                chat.receive(message)


async def _play(
    loaded: LoadedEnvironment, chat: FarChat, writer: asyncio.StreamWriter, message: dict[str, Any]
) -> None:
    try:
        task = loaded.task(message["split"], message["index"], message["id"])
        reward, metrics = checked(task.id, await loaded.environment.run(task, chat))
        end = json_frames.pack({"op": "done", "said": chat.said, "reward": reward, "metrics": metrics})
    except EpisodeFailed as error:
        end = _failed(error.kind if error.kind in FAILURE_KINDS else "raised", str(error))
    except (TemplateError, ImageError) as error:
        end = _failed("template", str(error))
    except MemoryError as error:
        end = _failed("out_of_memory", f"MemoryError: {error}")
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - every error of an environment becomes data
        end = _failed("raised", f"{type(error).__name__}: {error}")
    chat.over = True
    writer.write(end)


def _failed(kind: str, text: str) -> bytes:
    return json_frames.pack({"op": "failed", "kind": kind, "text": _clean(text)})


def _send_tasks(loaded: LoadedEnvironment, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send ids and messages of a split, in pages, and what answers are compared with. Payloads stay here: only the
    environment uses them."""
    try:
        tasks = loaded.tasks(message["split"])
        if len(tasks) > _MOST_TASKS:
            text = f"'{message['split']}' has {len(tasks)} tasks; with environment.workers the limit is {_MOST_TASKS}"
            raise ValueError(text)
        page: list[dict[str, Any]] = []
        chars = 0
        for task in tasks:
            expected = expected_of(task).told()
            opening = portable(task.messages, f"task {task.id}")
            page.append({"id": task.id, "messages": opening, "expected": expected})
            chars += 100 + sum(len(str(each.get("content"))) for each in opening)
            chars += sum(map(len, expected["columns"].values()))
            if chars > _PAGE_CHARS:
                writer.write(json_frames.pack({"op": "tasks", "tasks": page, "more": True}))
                page, chars = [], 0
        writer.write(json_frames.pack({"op": "tasks", "tasks": page, "more": False}))
    except Exception as error:  # noqa: BLE001 - environment code: its errors are reported
        _refuse(writer, f"tasks('{message['split']}'): {type(error).__name__}: {error}")


def _send_demonstration(loaded: LoadedEnvironment, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a demonstration, drawn from the caller's generator state: it is the same with and without workers."""
    rng = random.Random()
    version, state, gauss = message["state"]
    rng.setstate((version, tuple(state), gauss))
    try:
        environment = loaded.environment
        assert isinstance(environment, Demonstrator)  # the fork server has said so
        messages = environment.demonstrate(loaded.task(message["split"], message["index"], message["id"]), rng)
        plain_messages = portable(messages, "it")
        writer.write(json_frames.pack({"op": "demonstrated", "messages": plain_messages, "state": rng.getstate()}))
    except Exception as error:  # noqa: BLE001 - as above
        _refuse(writer, f"demonstrate(task '{message['id']}'): {type(error).__name__}: {error}")


def _refuse(writer: asyncio.StreamWriter, text: str) -> None:
    writer.write(json_frames.pack({"op": "refused", "kind": "environment", "text": _clean(text)}))


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()[: MAX_TEXT - 1]
