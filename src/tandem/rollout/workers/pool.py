"""Play an environment in a pool of worker processes, so that its failures cost only its own episodes.

consumes: episodes                       waits for: a free worker, then its messages, until the episode's deadline
produces: outcomes, or failures by kind  a worker that hangs or dies is replaced

Order of messages in an episode: this process sends `play`; the worker sends `offer`, `reply` and `judge` requests, each
answered here, and at last `done` or `failed`. They hold text and rewards (`env/worker_messages.py`); the recorder and
its tokens stay in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from functools import partial
from typing import Any

from pydantic import ValidationError

from tandem.env.worker_messages import ENDED, FROM_EPISODE, AskJudge, AskReply, AskTools, Done, Failed, Forget
from tandem.errors import EngineError, EnvironmentFailed, EpisodeFailed, ImageError, TemplateError
from tandem.io import json_frames
from tandem.protocols import Chat, Reply, TimedChat
from tandem.rollout.workers.forkserver_client import ForkServerClient, Order, place_of
from tandem.types import Message, Outcome, Task

_log = logging.getLogger(__name__)

Question = Callable[[], Coroutine[Any, Any, dict[str, Any]]]

GRACE_S = 1.0  # for cleanup in a cancelled episode
_EXIT_REPORT_S = 2.0
_RELOADS = 3


class WorkerEnvironment:
    """An Environment in worker processes. At most `workers` episodes run at once; while others wait for a worker, their
    deadlines are suspended."""

    def __init__(self, order: Order, workers: int) -> None:
        self._fork_server = ForkServerClient(order)
        self._pool = _Pool(order, self._fork_server, workers)
        self._splits: dict[str, list[Task]] = {}
        if threads := self._fork_server.loaded.threads:
            _log.warning("environment: loading it started %d threads; its workers are forks, and have none", threads)
        if self._fork_server.loaded.demonstrates:
            self.demonstrate = self._demonstrate

    @property
    def restarts(self) -> Counter[str]:
        """Replaced workers by reason."""
        return self._pool.restarts

    @property
    def sandbox(self) -> str:
        """What its sandbox opens, in a sentence; empty if it has none."""
        return self._pool.sandbox

    @property
    def report(self) -> str:
        """What loading found in the environment's data; empty if it says nothing."""
        return self._fork_server.loaded.report

    def tasks(self, split: str) -> list[Task]:
        if split not in self._splits:
            self._splits[split] = self._pool.fork_server.tasks(split)
        return self._splits[split]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        # Sampled before a worker is waited for: few workers do not slow the engine down, and which requests it samples
        # together does not depend on how fast they are.
        given = await chat.reply() if self._fork_server.loaded.replies_first else None
        with chat.off_the_clock() if isinstance(chat, TimedChat) else contextlib.nullcontext():
            worker = await self._pool.take()
        try:
            return await worker.play(task, chat, given)
        finally:
            self._pool.release(worker)

    def close(self) -> None:
        self._pool.close()

    def _demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return self._pool.fork_server.demonstrate(task, rng)


class _PoolWorker:
    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self._frames, self._writer = json_frames.Reader(reader), writer
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How its process ended."""
        self.playing = False
        self.broken = ""
        """Why it cannot be used again; empty if it can."""

    async def play(self, task: Task, chat: Chat, given: Reply | None) -> Outcome:
        """`given`: the episode's first reply, if it was asked for already."""
        self.playing = True
        first = {} if given is None else {"given": _told(given)}
        self._send({"op": "play", "id": task.id, **place_of(task), **first})
        asked: dict[int, asyncio.Task[None]] = {}
        engine_failure: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            while True:
                frame = await self._frame(task, engine_failure)
                message = self._checked(task, frame)
                if isinstance(message, AskReply):
                    chat.say(*(each.plain() for each in message.said))
                    question = partial(self._reply, chat, message)
                elif isinstance(message, AskJudge):
                    question = partial(self._judge, chat, message)
                elif isinstance(message, Forget):
                    if (forgotten := asked.pop(message.id, None)) is not None:
                        forgotten.cancel()
                    continue
                elif isinstance(message, AskTools):
                    chat.offer(message.tools)
                    continue
                else:
                    return self._end(task, chat, message)
                asked[message.id] = asyncio.create_task(self._answer(message.id, question, engine_failure))
        finally:
            for each in asked.values():
                each.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)
            if engine_failure.done():
                engine_failure.exception()  # retrieved, or asyncio would log it

    def _end(self, task: Task, chat: Chat, message: Done | Failed) -> Outcome:
        self.playing = False
        if isinstance(message, Failed):
            raise EpisodeFailed(message.kind, f"task {task.id}: {message.text}")
        chat.say(*(each.plain() for each in message.said))
        return Outcome(message.reward, message.metrics)

    async def cancel(self) -> None:
        """Cancel its episode and wait for its end; TimeoutError if it does not end."""
        self._send({"op": "cancel"})
        async with asyncio.timeout(GRACE_S):
            while frame := await self._frames.read():
                if isinstance(FROM_EPISODE.validate_json(frame), Done | Failed):
                    self.playing = False
                    return
        raise TimeoutError

    def close(self) -> None:
        self._writer.close()

    async def _frame(self, task: Task, engine_failure: asyncio.Future[Any]) -> bytes:
        reading = asyncio.ensure_future(self._frames.read())
        try:
            await asyncio.wait([reading, engine_failure], return_when=asyncio.FIRST_COMPLETED)
            if engine_failure.done():
                engine_failure.result()
            frame = reading.result()
        except json_frames.BadFrame as error:
            raise self._unusable(task, "protocol", str(error)) from error
        finally:
            reading.cancel()
        if not frame:
            how = "its process is gone"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_REPORT_S):
                    how = await asyncio.shield(self.ended)
            raise self._unusable(task, "crashed", f"the environment's process ended: {how}")
        return frame

    def _checked(self, task: Task, frame: bytes) -> Any:
        try:
            return FROM_EPISODE.validate_json(frame)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise self._unusable(task, "protocol", f"its message is invalid: {where}: {first['msg']}") from error

    def _unusable(self, task: Task, kind: str, text: str) -> EpisodeFailed:
        self.broken = kind
        return EpisodeFailed(kind, f"task {task.id}: {text}")

    async def _answer(self, number: int, question: Question, engine_failure: asyncio.Future[Any]) -> None:
        try:
            self._send({"id": number, **await question()})
        except (EpisodeFailed, TemplateError, ImageError) as error:
            kind = error.kind if isinstance(error, EpisodeFailed) else "template"
            self._send({"op": "wrong", "id": number, "kind": kind, "text": str(error)})
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - a dead engine ends the episode at once
            if not engine_failure.done():
                engine_failure.set_exception(error if isinstance(error, Exception) else EngineError(str(error)))

    @staticmethod
    async def _reply(chat: Chat, message: AskReply) -> dict[str, Any]:
        reply = await chat.reply(max_tokens=message.max_tokens, stop=message.stop)
        return {"op": "answer", **_told(reply)}

    @staticmethod
    async def _judge(chat: Chat, message: AskJudge) -> dict[str, Any]:
        messages = [each.plain() for each in message.messages]
        return {"op": "answer", "text": await chat.judge(messages, max_tokens=message.max_tokens)}

    def _send(self, value: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json_frames.pack(value))


def _told(reply: Reply) -> dict[str, Any]:
    calls = [asdict(call) for call in reply.tool_calls]
    return {"text": reply.text, "truncated": reply.truncated, "tool_calls": calls}


class _Pool:
    def __init__(self, order: Order, fork_server: ForkServerClient, size: int) -> None:
        self._order, self.fork_server, self._size = order, fork_server, size
        self._plays_once = order.sandbox is not None and order.sandbox.for_each_episode
        """Whether a worker is replaced after each episode, so that it leaves nothing to the next one."""
        self.restarts: Counter[str] = Counter()
        self._most_in_a_row = 3 * size + 10
        self._died_in_a_row = self._reloads = 0
        self._last = ""
        self._numbers = 0
        self._all: dict[int, _PoolWorker] = {}
        self._free: deque[_PoolWorker] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._starting = 0
        self._retiring: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Task[None] | None = None
        self._reloading = asyncio.Lock()

    @property
    def sandbox(self) -> str:
        return self._order.sandbox.text if self._order.sandbox is not None else ""

    async def take(self) -> _PoolWorker:
        while True:
            while self._free:
                worker = self._free.pop()
                if not worker.ended.done():
                    return worker
                self._discard(worker, "crashed")
            if len(self._all) + self._starting < self._size:
                return await self._start()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake_next()  # the worker meant for this call goes to the next
                raise

    def release(self, worker: _PoolWorker) -> None:
        """Return a worker to the pool without waiting; a task ends the rest of its episode."""
        if not worker.playing and not worker.broken and not worker.ended.done():
            self._died_in_a_row = 0
            if not self._plays_once:
                self._free.append(worker)
                self._wake_next()
                return
            ending = self._give_back(worker)
        else:
            ending = self._retire(worker)
        retiring = asyncio.ensure_future(ending)
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    def close(self) -> None:
        self._size = 0
        self.fork_server.close()
        if self._listener is not None and not self._listener.get_loop().is_closed():
            self._listener.cancel()
        for worker in self._all.values():
            with contextlib.suppress(RuntimeError):  # its event loop has ended and closed it
                worker.close()

    async def _retire(self, worker: _PoolWorker) -> None:
        why = worker.broken
        if not why and not worker.ended.done():
            try:
                await worker.cancel()
            except (TimeoutError, ValidationError, json_frames.BadFrame, ConnectionError):
                why = "crashed" if worker.ended.done() else "hung"
        if not why and not worker.ended.done():
            await self._give_back(worker)
            return
        if not worker.ended.done():
            self.fork_server.kill(worker.number, f"killed: {why}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_REPORT_S):  # so that its memory is free before a new worker starts
                    await asyncio.shield(worker.ended)
        self._discard(worker, why or "crashed")

    async def _give_back(self, worker: _PoolWorker) -> None:
        """Make room for the next episode, after one that left its worker able to play."""
        if not self._plays_once:
            self._free.append(worker)
        else:
            worker.close()
            self._all.pop(worker.number, None)
            self.fork_server.kill(worker.number, "its episode is over")
            if self._size:
                with contextlib.suppress(EpisodeFailed):  # the next episode tries again, and reports it
                    self._free.append(await self._start())
        self._wake_next()

    def _discard(self, worker: _PoolWorker, why: str) -> None:
        worker.close()
        self._all.pop(worker.number, None)
        if not self._size:
            return  # the pool is closed
        self.restarts[why] += 1
        self._died_in_a_row += 1
        self._last = worker.ended.result() if worker.ended.done() else why
        self._wake_next()

    def _wake_next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def _start(self) -> _PoolWorker:
        if self._died_in_a_row > self._most_in_a_row:
            raise EpisodeFailed(
                "crashed",
                f"environment: {self._died_in_a_row} workers in a row ended before an episode did, so no more are "
                f"started; the last one: {self._last}",
            )
        self._starting += 1
        try:
            await self._listening()
            self._numbers += 1
            number = self._numbers
            reader, writer = await asyncio.open_connection(sock=self.fork_server.start(number))
            worker = _PoolWorker(number, reader, writer)
            if not self._size:
                worker.close()
                raise EpisodeFailed("crashed", "environment: its workers were ended meanwhile")
            self._all[number] = worker
        except (EnvironmentFailed, OSError) as error:
            raise EpisodeFailed("crashed", str(error)) from error
        finally:
            self._starting -= 1
        return worker

    async def _listening(self) -> None:
        """Make sure that the fork server runs, and that a task receives its reports of ended workers."""
        async with self._reloading:
            if self._listener is not None and not self._listener.done():
                return
            if self._listener is not None:
                self._reloads += 1
                if self._reloads > _RELOADS:
                    raise EnvironmentFailed(
                        f"environment '{self._order.name}': its fork server died {self._reloads} times"
                    )
                _log.warning("environment: the fork server died; it is started and loaded again")
                await asyncio.to_thread(self.fork_server.close)
                self.fork_server = await asyncio.to_thread(ForkServerClient, self._order)
            control = self.fork_server.control.dup()
            control.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=control)
            self._listener = asyncio.create_task(self._listen(reader, writer))

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = json_frames.Reader(reader)
        try:
            while frame := await heard.read():
                ended = ENDED.validate_json(frame)
                worker = self._all.get(ended.worker)
                if worker is not None and not worker.ended.done():
                    worker.ended.set_result(ended.how)
        finally:
            writer.close()
            for worker in self._all.values():
                if not worker.ended.done():
                    worker.ended.set_result("its fork server ended")
