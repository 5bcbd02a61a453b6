"""`POST /v1/responses`: a chat completion in the form of OpenAI's Responses API. Nothing is kept between requests."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tandem.errors import TandemError
from tandem.serve.http.openapi_document import EVENTS, JSON, speaks
from tandem.serve.http.refusals import RequestRefused, as_refused
from tandem.serve.openai.choices import CHAT, Choice, ChoiceDelta, SampleJob, usage
from tandem.serve.openai.requests import read
from tandem.serve.openai.responses_requests import ResponsesRequest, as_chat, named_as_here
from tandem.serve.openai.routes import OpenAi
from tandem.serve.openai.text_stream import TokenNames

Event = dict[str, Any]


class Responses:
    def __init__(self, api: OpenAi) -> None:
        self.api = api

    def router(self, prefix: str) -> APIRouter:
        router = APIRouter(prefix=prefix)
        router.add_api_route("/responses", self.respond, methods=["POST"])
        router.add_api_route("/responses/{name:path}", self.kept, methods=["GET"])
        return router

    async def kept(self, name: str) -> Response:
        """Nothing is kept."""
        raise RequestRefused(404, f"there is no response '{name}': this service keeps none", code="response_not_found")

    @speaks(ResponsesRequest, answers=(JSON, EVENTS))
    async def respond(self, request: Request) -> Response:
        asked, given = await read(request, as_chat)
        with named_as_here():
            job = await self.api.chat_job(request, given, keep=False)
        turn = Turn(asked, job, job.speech or self.api.renderer)
        if asked.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"} | self.api.headers(job)
            return StreamingResponse(self._events(job, turn), media_type="text/event-stream", headers=headers)
        (choice,) = await self.api.whole(request, job, parts_thoughts=True)
        for _ in (*turn.told(choice.take()), *turn.ended(choice)):
            pass
        return JSONResponse(turn.body, headers=self.api.headers(job))

    async def _events(self, job: SampleJob, turn: Turn) -> AsyncIterator[str]:
        choices = self.api.choices(job, parts_thoughts=True)
        for event in turn.begun():
            yield _written(event)
        try:
            async for choice in self.api.play(job, choices):
                piece = choice.take()
                for event in turn.told(piece):
                    yield _written(event)
                if piece.finish_reason:
                    for event in turn.ended(choice):
                        yield _written(event)
        except TandemError as error:  # the status line was sent, so the failure is sent as an event
            told = as_refused(error)
            for event in turn.failed(told.code, told.message):
                yield _written(event)


class Turn:
    """One response while it is sampled, as events; `body` is the whole."""

    def __init__(self, asked: ResponsesRequest, job: SampleJob, names: TokenNames) -> None:
        self._job, self._names, self._number = job, names, 0
        self._open: Event | None = None
        """The item that grows: a thought or a message."""
        text = {"format": asked.text.format.model_dump(by_alias=True, exclude_unset=True) or {"type": "text"}}
        self.body: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "error": None, "incomplete_details": None, "instructions": asked.instructions,
            "metadata": asked.metadata, "model": asked.model, "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls, "temperature": asked.temperature, "top_p": asked.top_p,
            "tool_choice": asked.tool_choice, "tools": asked.tools, "text": text, "store": False,
            "max_output_tokens": asked.max_output_tokens, "top_logprobs": asked.top_logprobs,
            "truncation": "disabled", "previous_response_id": None, "usage": None,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
        }  # fmt: skip

    def begun(self) -> Iterator[Event]:
        yield self._event("response.created", response=self.body)
        yield self._event("response.in_progress", response=self.body)

    def told(self, piece: ChoiceDelta) -> Iterator[Event]:
        """Add what a choice has gained."""
        if piece.thought:
            yield from self._grow("reasoning", piece.thought, [])
        if piece.text:
            yield from self._grow("message", piece.text, self._logprobs(piece))
        for call in piece.calls:
            yield from self._close()
            yield from self._call(call)

    def ended(self, choice: Choice) -> Iterator[Event]:
        """Close the response."""
        reason, counted = choice.finish_reason, usage(self._job, [choice])
        yield from self._close("incomplete" if reason == "length" else "completed")
        self.body["usage"] = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        }  # fmt: skip
        self.body["weight_version"] = choice.version
        if reason == "length":
            self.body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self.body |= {"status": "completed", "completed_at": int(time.time())}
        yield self._event(f"response.{self.body['status']}", response=self.body)

    def failed(self, code: str, message: str) -> Iterator[Event]:
        self.body |= {"status": "failed", "error": {"code": code, "message": message}}
        yield self._event("response.failed", response=self.body)

    # --- items

    @property
    def _place(self) -> int:
        return len(self.body["output"]) - 1

    def _event(self, kind: str, **more: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _grow(self, kind: str, text: str, logprobs: list[Any]) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._begin(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] += logprobs
            more["logprobs"] = logprobs
        yield self._event(f"response.{part['type']}.delta", **self._where, delta=text, **more)

    def _begin(self, kind: str) -> Iterator[Event]:
        if kind == "message":
            item: Event = {"id": f"msg_{uuid.uuid4().hex}", "type": kind, "role": "assistant"}
            part: Event = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item, part = {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "summary": []}, {"type": "reasoning_text"}
            part["text"] = ""
        self._open = item | {"status": "in_progress", "content": []}
        self.body["output"].append(self._open)
        yield self._event("response.output_item.added", output_index=self._place, item=self._open)
        yield self._event("response.content_part.added", **self._where, part=dict(part))
        self._open["content"].append(part)

    @property
    def _where(self) -> Mapping[str, Any]:
        return {"item_id": self.body["output"][-1]["id"], "output_index": self._place, "content_index": 0}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if self._open is None:
            return
        item, part = self._open, self._open["content"][0]
        item["status"] = status
        more = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
        yield self._event(f"response.{part['type']}.done", **self._where, text=part["text"], **more)
        yield self._event("response.content_part.done", **self._where, part=part)
        yield self._event("response.output_item.done", output_index=self._place, item=item)
        self._open = None

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item: Event = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call["id"], "name": name}
        item |= {"arguments": "", "status": "in_progress"}
        self.body["output"].append(item)
        where = {"item_id": item["id"], "output_index": self._place}
        yield self._event("response.output_item.added", output_index=self._place, item=dict(item))
        yield self._event("response.function_call_arguments.delta", **where, delta=arguments)
        item |= {"arguments": arguments, "status": "completed"}
        yield self._event("response.function_call_arguments.done", **where, arguments=arguments, name=name)
        yield self._event("response.output_item.done", output_index=self._place, item=item)

    def _logprobs(self, piece: ChoiceDelta) -> list[Any]:
        if not self._job.logprobs:
            return []
        found = CHAT.choice(piece, self._job, self._names)["logprobs"]["content"]
        return [_with_bytes(each) | {"top_logprobs": [*map(_with_bytes, each["top_logprobs"])]} for each in found]


def _with_bytes(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**entry, "bytes": entry["bytes"] or []}


def _written(event: Event) -> str:
    """Return a server-sent event in ASCII: some clients' languages break lines at U+0085 or U+2028."""
    return f"event: {event['type']}\ndata: {json.dumps(event, allow_nan=False, separators=(',', ':'))}\n\n"
