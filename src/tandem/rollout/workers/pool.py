"""An environment that is played in processes of its own, so that whatever it does costs its own episode.

consumes: episodes                       waits for: a free worker, then what it says, until the episode's deadline
produces: outcomes, or failures by kind  a worker that hangs or died is replaced

What a worker says comes by `env/worker_messages.py`: text and rewards. The recorder and its tokens stay in this
process.
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
from tandem.errors import EngineError, EnvironmentFailed, EpisodeFailed, TemplateError
from tandem.io import json_frames
from tandem.protocols import Chat
from tandem.rollout.workers.forkserver_client import ForkServerClient, Order
from tandem.types import Message, Outcome, Task

_log = logging.getLogger(__name__)

Question = Callable[[], Coroutine[Any, Any, dict[str, Any]]]

GRACE_S = 1.0  # for what a cancelled episode still has to close
_EPITAPH_S = 2.0
_RELOADS = 3


class WorkerEnvironment:
    """An Environment. `workers` episodes are played at once; whoever comes later waits, on nobody's time."""

    def __init__(self, order: Order, workers: int) -> None:
        self._nursery = ForkServerClient(order)
        self._pool = _Pool(order, self._nursery, workers)
        self._splits: dict[str, list[Task]] = {}
        if threads := self._nursery.loaded.threads:
            _log.warning("environment: loading it started %d threads; its workers are forks, and have none", threads)
        if self._nursery.loaded.demonstrates:
            self.demonstrate = self._demonstrate

    @property
    def restarts(self) -> Counter[str]:
        """Workers that were replaced, by why."""
        return self._pool.restarts

    def tasks(self, split: str) -> list[Task]:
        if split not in self._splits:
            self._splits[split] = self._pool.nursery.tasks(split)
        return self._splits[split]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        off_the_clock = getattr(chat, "off_the_clock", contextlib.nullcontext)
        with off_the_clock():
            worker = await self._pool.take()
        try:
            return await worker.play(task, chat)
        finally:
            self._pool.give_back(worker)

    def close(self) -> None:
        self._pool.close()

    def _demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return self._pool.nursery.demonstrate(task, rng)


class _PoolWorker:
    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self._frames, self._writer = json_frames.Reader(reader), writer
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How."""
        self.playing = False
        self.broken = ""
        """Why it cannot be used again."""

    async def play(self, task: Task, chat: Chat) -> Outcome:
        self.playing = True
        self._tell({"op": "play", "id": task.id, **task.payload})
        asked: dict[int, asyncio.Task[None]] = {}
        broke: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            while True:
                frame = await self._frame(task, broke)
                told = self._checked(task, frame)
                if isinstance(told, AskReply):
                    chat.say(*(message.plain() for message in told.said))
                    question = partial(self._reply, chat, told)
                elif isinstance(told, AskJudge):
                    question = partial(self._judge, chat, told)
                elif isinstance(told, Forget):
                    if (forgotten := asked.pop(told.id, None)) is not None:
                        forgotten.cancel()
                    continue
                elif isinstance(told, AskTools):
                    chat.offer(told.tools)
                    continue
                else:
                    return self._end(task, chat, told)
                asked[told.id] = asyncio.create_task(self._answer(told.id, question, broke))
        finally:
            for each in asked.values():
                each.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)
            if broke.done():
                broke.exception()  # looked at, or asyncio would complain

    def _end(self, task: Task, chat: Chat, told: Done | Failed) -> Outcome:
        self.playing = False
        if isinstance(told, Failed):
            raise EpisodeFailed(told.kind, f"task {task.id}: {told.text}")
        chat.say(*(message.plain() for message in told.said))
        return Outcome(told.reward, told.metrics)

    async def cancel(self) -> None:
        """Its episode has ended, well or not; TimeoutError if it does not."""
        self._tell({"op": "cancel"})
        async with asyncio.timeout(GRACE_S):
            while frame := await self._frames.read():
                if isinstance(FROM_EPISODE.validate_json(frame), Done | Failed):
                    self.playing = False
                    return
        raise TimeoutError

    def close(self) -> None:
        self._writer.close()

    async def _frame(self, task: Task, broke: asyncio.Future[Any]) -> bytes:
        reading = asyncio.ensure_future(self._frames.read())
        try:
            await asyncio.wait([reading, broke], return_when=asyncio.FIRST_COMPLETED)
            if broke.done():
                broke.result()
            frame = reading.result()
        except json_frames.BadFrame as error:
            raise self._unusable(task, "protocol", str(error)) from error
        finally:
            reading.cancel()
        if not frame:
            how = "its process is gone"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EPITAPH_S):
                    how = await asyncio.shield(self.ended)
            raise self._unusable(task, "crashed", f"the environment's process ended: {how}")
        return frame

    def _checked(self, task: Task, frame: bytes) -> Any:
        try:
            return FROM_EPISODE.validate_json(frame)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise self._unusable(
                task, "protocol", f"what it said is not understood: {where}: {first['msg']}"
            ) from error

    def _unusable(self, task: Task, kind: str, text: str) -> EpisodeFailed:
        self.broken = kind
        return EpisodeFailed(kind, f"task {task.id}: {text}")

    async def _answer(self, number: int, question: Question, broke: asyncio.Future[Any]) -> None:
        try:
            self._tell({"id": number, **await question()})
        except (EpisodeFailed, TemplateError) as error:
            kind = error.kind if isinstance(error, EpisodeFailed) else "template"
            self._tell({"op": "wrong", "id": number, "kind": kind, "text": str(error)})
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - a dead engine ends the episode, whatever it would make of it
            if not broke.done():
                broke.set_exception(error if isinstance(error, Exception) else EngineError(str(error)))

    @staticmethod
    async def _reply(chat: Chat, told: AskReply) -> dict[str, Any]:
        reply = await chat.reply(max_tokens=told.max_tokens, stop=told.stop)
        calls = [asdict(call) for call in reply.tool_calls]
        return {"op": "answer", "text": reply.text, "truncated": reply.truncated, "tool_calls": calls}

    @staticmethod
    async def _judge(chat: Chat, told: AskJudge) -> dict[str, Any]:
        messages = [message.plain() for message in told.messages]
        return {"op": "answer", "text": await chat.judge(messages, max_tokens=told.max_tokens)}

    def _tell(self, value: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json_frames.pack(value))


class _Pool:
    def __init__(self, order: Order, nursery: ForkServerClient, size: int) -> None:
        self._order, self.nursery, self._size = order, nursery, size
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

    async def take(self) -> _PoolWorker:
        while True:
            while self._free:
                worker = self._free.pop()
                if not worker.ended.done():
                    return worker
                self._discard(worker, "crashed")
            if len(self._all) + self._starting < self._size:
                return await self._start()
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()  # it was this one's turn, and will not be used
                raise

    def give_back(self, worker: _PoolWorker) -> None:
        """At once: what is left of its episode is ended aside."""
        if not worker.playing and not worker.broken and not worker.ended.done():
            self._died_in_a_row = 0
            self._free.append(worker)
            self._next()
            return
        retiring = asyncio.ensure_future(self._retire(worker))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    def close(self) -> None:
        self._size = 0
        self.nursery.close()
        if self._listener is not None and not self._listener.get_loop().is_closed():
            self._listener.cancel()
        for worker in self._all.values():
            with contextlib.suppress(RuntimeError):  # its event loop is over, and closed it
                worker.close()

    async def _retire(self, worker: _PoolWorker) -> None:
        why = worker.broken
        if not why and not worker.ended.done():
            try:
                await worker.cancel()
            except (TimeoutError, ValidationError, json_frames.BadFrame, ConnectionError):
                why = "crashed" if worker.ended.done() else "hung"
        if not why and not worker.ended.done():
            self._free.append(worker)
            self._next()
            return
        if not worker.ended.done():
            self.nursery.kill(worker.number, f"killed: {why}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EPITAPH_S):  # its memory is free before another one starts
                    await asyncio.shield(worker.ended)
        self._discard(worker, why or "crashed")

    def _discard(self, worker: _PoolWorker, why: str) -> None:
        worker.close()
        self._all.pop(worker.number, None)
        if not self._size:
            return  # closed: it ended with the rest
        self.restarts[why] += 1
        self._died_in_a_row += 1
        self._last = worker.ended.result() if worker.ended.done() else why
        self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
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
            reader, writer = await asyncio.open_connection(sock=self.nursery.start(number))
            worker = self._all[number] = _PoolWorker(number, reader, writer)
        except (EnvironmentFailed, OSError) as error:
            raise EpisodeFailed("crashed", str(error)) from error
        finally:
            self._starting -= 1
        return worker

    async def _listening(self) -> None:
        """The nursery is there, and how workers end is heard."""
        async with self._reloading:
            if self._listener is not None and not self._listener.done():
                return
            if self._listener is not None:
                self._reloads += 1
                if self._reloads > _RELOADS:
                    raise EnvironmentFailed(f"environment '{self._order.name}': its process died {self._reloads} times")
                _log.warning("environment: the process that starts its workers died; it is loaded again")
                await asyncio.to_thread(self.nursery.close)
                self.nursery = await asyncio.to_thread(ForkServerClient, self._order)
            control = self.nursery.control.dup()
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
                    worker.ended.set_result("the process that had started it ended")
