"""An environment that harms its own worker process in many ways; tests load it by its file."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.types import Outcome, Task


@dataclass(frozen=True)
class Hostile:
    kind: str = "well"
    every: int = 2
    """Of so many tasks, the first is played as `kind` says."""
    once: str = ""
    """A file: it goes wrong only as long as this is not there."""

    def tasks(self, split: str) -> list[Task]:
        opening = ({"role": "user", "content": "?"},)
        return [Task(f"{split}-{index}", opening, {"secret": object(), "index": index}) for index in range(4)]

    async def run(self, task: Task, chat: Any) -> Outcome:
        assert task.payload["secret"] is not None
        reply = await chat.reply()
        if task.payload["index"] % self.every == 0 and not (self.once and self._again()):
            await getattr(self, self.kind)(chat)
        return Outcome(1.0, {"correct": 1.0, "length": len(reply.text), "process": os.getpid()})

    def demonstrate(self, task: Task, rng: Any) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": f"{task.payload['index']}{rng.random()}"}]

    def _again(self) -> bool:
        """In one act: the second of two workers that ask at the same time finds it there."""
        try:
            Path(self.once).touch(exist_ok=False)
        except FileExistsError:
            return True
        return False

    async def well(self, chat: Any) -> None:
        chat.say("thank you")

    async def waits(self, chat: Any) -> None:
        await asyncio.Event().wait()

    async def sleeps(self, chat: Any) -> None:
        time.sleep(1000)

    async def ignores_sigterm(self, chat: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)

    async def holds_the_gil(self, chat: Any) -> None:
        ctypes.PyDLL(None).sleep(1000)

    async def exits(self, chat: Any) -> None:
        os._exit(3)

    async def faults(self, chat: Any) -> None:
        ctypes.string_at(0)

    async def eats_memory(self, chat: Any) -> None:
        bytearray(10 * 2**30)

    async def floods(self, chat: Any) -> None:
        while True:
            sys.stdout.write("flood " * 1000)

    async def forks(self, chat: Any) -> None:
        for _ in range(100_000):
            if os.fork() == 0:
                time.sleep(1000)

    async def leaves_a_child(self, chat: Any) -> None:
        """In another session, with no parent left."""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        os.wait()
        os._exit(4)

    async def ends_well_before_its_child(self, chat: Any) -> None:
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)

    async def keeps_a_child(self, chat: Any) -> None:
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
            os._exit(0)

    async def raises(self, chat: Any) -> None:
        raise KeyError("answer")

    async def says_no_json(self, chat: Any) -> None:
        chat._writer.write((5).to_bytes(4) + b"hello")
        await asyncio.Event().wait()

    async def says_too_much(self, chat: Any) -> None:
        chat._writer.write((2**31).to_bytes(4) + b"x" * 1000)
        await asyncio.Event().wait()

    async def forges_tokens(self, chat: Any) -> None:
        chat._send({"op": "done", "said": [], "reward": 1.0, "metrics": {}, "ids": [1, 2, 3]})
        await asyncio.Event().wait()

    async def gives_nan(self, chat: Any) -> None:
        body = b'{"op":"done","said":[],"reward":NaN,"metrics":{}}'
        chat._writer.write(len(body).to_bytes(4) + body)
        await asyncio.Event().wait()
