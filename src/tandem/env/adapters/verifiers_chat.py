"""An OpenAI-compatible endpoint on loopback for verifiers' client, answered by a Chat that records tokens.

The server passes each request to its episode, found by the session header (the id of verifiers' trace), and the
episode asks its Chat for the reply.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from tandem.errors import EpisodeFailed
from tandem.protocols import Chat, Reply
from tandem.types import Message

SESSION, SECRET = "X-Session-ID", "X-Tandem-Secret"
_MAX_BODY = 64 * 2**20

Answer = asyncio.Future[dict[str, Any] | None]
"""The completion; None if the episode has ended."""


class VerifiersConversation:
    """Answer OpenAI requests, which hold the whole conversation, from one Chat. Requests cannot change the history."""

    def __init__(self, task_id: str, opening: Sequence[Message], chat: Chat) -> None:
        self._task_id, self._chat = task_id, chat
        self._seen = [_plain(message) for message in opening]
        self._tools: list[Any] | None = None
        self._calls = 0

    async def reply(self, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = [_plain(message) for message in body["messages"]]
        known = len(self._seen)
        if asked[:known] != self._seen or any(message["role"] == "assistant" for message in asked[known:]):
            raise EpisodeFailed(
                "raised",
                f"task {self._task_id}: the harness sent another history than before (a summary, a second "
                "agent?); a Chat is one growing conversation. `tandem gateway` records branches",
            )
        self._offer(body.get("tools") or [])
        self._chat.say(*asked[known:])
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        stop = body.get("stop") or ()
        reply = await self._chat.reply(max_tokens=most, stop=[stop] if isinstance(stop, str) else stop)
        spoken = self._spoken(reply)
        self._seen = [*asked, _plain(spoken)]
        return _completion(spoken, reply.truncated, str(body.get("model", "")))

    def _offer(self, tools: list[Any]) -> None:
        if self._tools is None:
            self._tools = tools
            if tools:
                self._chat.offer(tools)
        elif tools != self._tools:
            raise EpisodeFailed("raised", f"task {self._task_id}: the harness offers other tools than at first")

    def _spoken(self, reply: Reply) -> dict[str, Any]:
        spoken: dict[str, Any] = {"role": "assistant", "content": reply.text}
        calls: list[dict[str, Any]] = []
        for call in reply.tool_calls:
            # An unreadable call is passed on as written: the harness finds the invalid JSON and tells the model.
            arguments = call.raw if call.error else json.dumps(dict(call.arguments), ensure_ascii=False)
            function = {"name": call.name or "unreadable", "arguments": arguments}
            calls.append({"id": f"call_{self._calls}", "type": "function", "function": function})
            self._calls += 1
        return {**spoken, "tool_calls": calls} if calls else spoken


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a message that a template reads, so that two forms of one message are equal."""
    plain: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"))}
    calls = cast("list[dict[str, Any]]", message.get("tool_calls") or [])
    if calls:
        plain["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {key: call["function"][key] for key in ("name", "arguments")},
            }
            for call in calls
        ]
    if plain["role"] == "tool":
        plain |= {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}
    return plain


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    parts = cast("list[dict[str, Any]]", content)
    if any(part.get("type") != "text" for part in parts):
        raise EpisodeFailed("raised", "a message has a part that is not text; the policy reads only text")
    return "\n".join(part["text"] for part in parts)


def _completion(spoken: dict[str, Any], truncated: bool, model: str) -> dict[str, Any]:
    finish = "length" if truncated else "tool_calls" if spoken.get("tool_calls") else "stop"
    choice = {"index": 0, "message": spoken, "finish_reason": finish}
    made = int(time.time())
    name = f"chatcmpl-{secrets.token_hex(8)}"
    return {"id": name, "object": "chat.completion", "created": made, "model": model, "choices": [choice]}


class EpisodeQuestions:
    """The requests of one episode."""

    def __init__(self, by_session: dict[str, EpisodeQuestions]) -> None:
        self._by_session = by_session
        self._sessions: list[str] = []
        self._queue: asyncio.Queue[tuple[dict[str, Any], Answer] | None] = asyncio.Queue()
        self._waiting: set[Answer] = set()

    def add(self, session: str) -> None:
        """Pass requests of this session to this episode."""
        self._sessions.append(session)
        self._by_session[session] = self

    def end(self) -> None:
        """Note that no more requests will come."""
        self._queue.put_nowait(None)

    async def next(self) -> tuple[dict[str, Any], Answer] | None:
        return await self._queue.get()

    async def ask(self, body: dict[str, Any]) -> dict[str, Any] | None:
        answer: Answer = asyncio.get_running_loop().create_future()
        self._waiting.add(answer)
        self._queue.put_nowait((body, answer))
        try:
            return await answer
        finally:
            self._waiting.discard(answer)

    def close(self) -> None:
        for session in self._sessions:
            self._by_session.pop(session, None)
        for answer in self._waiting:
            if not answer.done():
                answer.set_result(None)


@dataclass
class Endpoint:
    """The HTTP server; it runs inside `serving()`."""

    url: str = ""
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    _by_session: dict[str, EpisodeQuestions] = field(default_factory=dict[str, EpisodeQuestions])

    def questions(self) -> EpisodeQuestions:
        return EpisodeQuestions(self._by_session)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        web: Any = importlib.import_module("aiohttp.web")  # a requirement of verifiers

        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = cast(int, runner.addresses[0][1])
            self.url = f"http://127.0.0.1:{port}/v1"
            yield
        finally:
            await runner.cleanup()

    async def _answer(self, request: Any) -> Any:
        web: Any = importlib.import_module("aiohttp.web")

        if not secrets.compare_digest(request.headers.get(SECRET, ""), self.secret):
            return web.json_response({"error": {"message": "unauthorized"}}, status=401)
        questions = self._by_session.get(request.headers.get(SESSION, ""))
        body = await request.json()
        completion = await questions.ask(body) if questions is not None else None
        if completion is None:
            return web.json_response({"error": {"message": "no episode of this session is being played"}}, status=404)
        if not body.get("stream"):
            return web.json_response(completion)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        with suppress(ConnectionError):
            await response.prepare(request)
            await response.write(f"data: {json.dumps(_chunk(completion))}\n\ndata: [DONE]\n\n".encode())
        return response


def _chunk(completion: dict[str, Any]) -> dict[str, Any]:
    """Return the completion as the only chunk of a stream."""
    choice = completion["choices"][0]
    calls = [{**call, "index": index} for index, call in enumerate(choice["message"].get("tool_calls", []))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    piece = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
    return {**completion, "object": "chat.completion.chunk", "choices": [piece]}
