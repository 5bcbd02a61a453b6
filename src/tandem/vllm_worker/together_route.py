"""Take many requests in one of HTTP: middleware of vLLM's API server (`--middleware`).

consumes: a list of requests, or names of some     waits for: vLLM's core
produces: a line for each request, as it ends      none waits for another

vLLM's own route takes 1.7 ms of its server for a request, most of it for HTTP, middleware and validation. With answers
of a few tokens that is most of a rollout.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, TypeAlias

from tandem.ops.vllm_token_protocol import ABORT, TOGETHER

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class TogetherRoute:
    """Answers TOGETHER and ABORT, and leaves all else to vLLM."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._running: dict[str, asyncio.Task[dict[str, Any]]] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in (TOGETHER, ABORT):
            await self._app(scope, receive, send)
        elif (body := await _body(receive)) is None:
            return
        elif scope["path"] == TOGETHER:
            await self._answer_all(scope["app"].state, json.loads(body), receive, send)
        else:
            for name in json.loads(body):
                if (task := self._running.get(name)) is not None:
                    task.cancel()  # vLLM's generator then aborts it
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def _answer_all(self, vllm: Any, requests: list[dict[str, Any]], receive: Receive, send: Send) -> None:
        """Send a line for each request. If the client leaves, what still runs is aborted."""
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        running = {each["name"]: asyncio.create_task(sampled(vllm, each)) for each in requests}
        for name, task in running.items():
            task.add_done_callback(partial(_tell, lines, name))
        self._running |= running
        leaving = asyncio.create_task(_left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            missing = len(requests)
            while missing:
                line = asyncio.ensure_future(lines.get())
                try:
                    await asyncio.wait((line, leaving), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not line.done():
                        line.cancel()
                if leaving.done() or vllm.engine_client.errored:
                    return  # without an end of the answer: for a client that is still there, vLLM is gone
                ready = [line.result(), *(lines.get_nowait() for _ in range(lines.qsize()))]
                missing -= len(ready)
                await send({"type": "http.response.body", "body": b"".join(ready), "more_body": missing > 0})
        finally:
            for name in running:
                self._running.pop(name, None)
            tasks: list[asyncio.Task[Any]] = [*running.values(), leaving]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _body(receive: Receive) -> bytes | None:
    """Return the body; None if the client has left."""
    found = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        found += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(found)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _tell(lines: asyncio.Queue[bytes], name: str, done: asyncio.Task[dict[str, Any]]) -> None:
    if done.cancelled():
        told = {"refused": "it was aborted"}
    elif (error := done.exception()) is not None:  # it is this request's answer, and the others go on
        told = {"refused": f"{type(error).__name__}: {error}"}
    else:
        told = done.result()
    lines.put_nowait(json.dumps({"name": name, **told}).encode() + b"\n")


async def sampled(vllm: Any, request: dict[str, Any]) -> dict[str, Any]:
    from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

    models, model = vllm.openai_serving_models, request["model"]
    adapter = models.lora_requests.get(model)
    if adapter is None and not models.is_base_model(model):
        return {"refused": f"there is no model '{model}'"}
    sampling = SamplingParams(**request["sampling_params"])
    sampling.output_kind = RequestOutputKind.FINAL_ONLY
    prompt = tokens_input(request["token_ids"], cache_salt=request["cache_salt"])
    answers = vllm.engine_client.generate(prompt, sampling, request["name"], lora_request=adapter)
    *_, last = [each async for each in answers]
    (choice,) = last.outputs
    return {"token_ids": list(choice.token_ids), "finish_reason": choice.finish_reason}
