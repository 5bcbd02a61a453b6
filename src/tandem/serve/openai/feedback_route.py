"""`/v1/feedback`: a thumb up or down, or a number, for a chat completion by its id, and perhaps a better answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from tandem.io.chat_feedback import ChatStore
from tandem.serve.http.openapi_document import speaks
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.openai.requests import checked, read
from tandem.serve.openai.strict import Strict
from tandem.types import MAX_NUMBER

OnRated = Callable[[int, float], object]


class ChatFeedback(Strict):
    id: str = Field(min_length=1, max_length=128)
    """The `id` of the chat completion."""
    value: bool | Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
    """true: thumb up; false: thumb down; or a number. It replaces an earlier value of the same answer."""
    choice: int = Field(0, ge=0)
    """The `index` of the answer, of a request with `n` above 1."""
    better: str = Field("", max_length=2**18)
    """What the answer should have been."""


def feedback_router(chats: ChatStore | None, on_rated: OnRated = lambda version, value: None) -> APIRouter:
    """Build the route. `on_rated`: called with the answer's version and the value, once both are on the disk."""

    @speaks(ChatFeedback)
    async def feedback(request: Request) -> JSONResponse:
        """Rate an answer that this service gave. The same request again changes nothing."""
        if chats is None:
            text = (
                "this service keeps no chats: start `tandem serve` or `tandem deploy` with --feedback, or set "
                "feedback = true in the spec"
            )
            raise RequestRefused(404, text, code="no_feedback")
        body = await read(request, partial(checked, ChatFeedback))
        found = await chats.rate(body.id, body.choice, float(body.value), body.better.strip())
        if found is None:
            text = f"there is no chat '{body.id}'; unrated chats are kept up to {chats.max_bytes / 2**30:g} GiB"
            raise RequestRefused(404, text, field="id", code="chat_not_found")
        answers, version = found
        if body.choice >= answers:
            raise RequestRefused(422, f"{body.choice}: the chat has {answers} answers, from 0", field="choice")
        on_rated(version, float(body.value))
        return JSONResponse(
            {"id": body.id, "choice": body.choice, "value": float(body.value), "weight_version": version}
        )

    router = APIRouter(prefix="/v1")
    router.add_api_route("/feedback", feedback, methods=["POST"])
    return router
