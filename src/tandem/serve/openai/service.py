"""Put OpenAI's routes together: for one model alone, and as a part of other services."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter

from tandem.io.chat_feedback import ChatStore
from tandem.serve.http.service import Service
from tandem.serve.openai.feedback_route import feedback_router
from tandem.serve.openai.other_routes import Others, missing_router
from tandem.serve.openai.responses_route import Responses
from tandem.serve.openai.routes import ChatRenderer, OpenAi, Sampler, Stateless


def openai_router(api: OpenAi, prefix: str) -> APIRouter:
    """Build OpenAI's routes, and refusals of those that there are not."""
    router = APIRouter()
    for each in (api.router(prefix), Responses(api).router(prefix), missing_router(prefix)):
        router.include_router(each)
    return router


def openai_service(
    engine: Sampler, renderer: ChatRenderer, *, model_id: str, context: int, num_ids: int, max_requests: int = 4096,
    chats: ChatStore | None = None, adapters: Mapping[str, Sampler] | None = None,
    start: Callable[[], Awaitable[None]] | None = None,
) -> Service:  # fmt: skip
    """Build the service. `context`: most tokens of prompt and completion together. `num_ids`: size of the vocabulary.
    `max_requests`: most samples at a time. `chats`: keeps chats for feedback. `adapters`: further models by their
    names. `start`: called before the first request."""
    renderer = renderer.within(context)
    api = OpenAi(
        engine, renderer, Stateless(renderer), model_id, context, num_ids, max_requests, chats=chats,
        adapters={} if adapters is None else adapters,
    )  # fmt: skip
    router = APIRouter()
    for each in (openai_router(api, "/v1"), feedback_router(chats), Others(api).router()):
        router.include_router(each)

    async def close() -> None:
        await engine.close()
        if chats is not None:
            chats.close()

    return Service("tandem serve", router, api.limits, api.books.registry, close, start=start)
