"""What clients of OpenAI and vLLM look for besides completions: counting tokens, the version, and what there is not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from tandem.serve.http.openapi_document import speaks
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.service import aside
from tandem.serve.openai.requests import ChatMessage, Tool, conversation, parse
from tandem.serve.openai.routes import OpenAi
from tandem.serve.openai.strict import Strict

_NOT_HERE = {
    "/embeddings": "embeddings", "/moderations": "moderations", "/images/generations": "images",
    "/audio/speech": "speech", "/audio/transcriptions": "transcriptions",
}  # fmt: skip


class TokenizeBody(Strict):
    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Literal[True] = True
    add_special_tokens: Literal[False] = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages: send one of them")
        return self


class DetokenizeBody(Strict):
    model: str = ""
    tokens: list[Annotated[int, Field(ge=0)]] = Field(max_length=2**20)


class Others:
    def __init__(self, api: OpenAi) -> None:
        self.api = api

    def router(self) -> APIRouter:
        """vLLM's routes, which have no prefix."""
        router = APIRouter()
        router.add_api_route("/version", self.version, methods=["GET"])
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        return router

    async def version(self) -> JSONResponse:
        try:
            return JSONResponse({"version": version("tandem-rl")})
        except PackageNotFoundError:  # a checkout that is not installed
            return JSONResponse({"version": "unknown"})

    @speaks(TokenizeBody)
    async def tokenize(self, request: Request) -> JSONResponse:
        """Return the ids of a text, or of a chat as the model's template writes it."""
        asked = await parse(TokenizeBody, request)
        renderer = self.api.renderer
        if asked.messages is None:
            ids = await self.api.opened("prompt", aside(request)(renderer.encode, asked.prompt or ""))
        else:
            chat = {"model": self.api.model_id, **asked.model_dump(exclude_unset=True, include=_OF_A_CHAT)}
            given = conversation(chat)
            renderer = await self.api.renderer_for(request, given.asked)
            ids = await self.api.opened("messages", aside(request)(renderer.prompt, given.messages, given.tools))
        names = [renderer.token_text(token_id) for token_id in ids] if asked.return_token_strs else None
        told = {"count": len(ids), "max_model_len": self.api.context, "tokens": ids, "token_strs": names}
        return JSONResponse(told)

    @speaks(DetokenizeBody)
    async def detokenize(self, request: Request) -> JSONResponse:
        """Return the text of ids."""
        asked = await parse(DetokenizeBody, request)
        if max(asked.tokens, default=0) >= self.api.num_ids:
            raise RequestRefused(422, f"has a token id outside 0 to {self.api.num_ids - 1}", field="tokens")
        decode = partial(self.api.renderer.decode, skip_special=False)
        return JSONResponse({"prompt": await aside(request)(decode, asked.tokens)})


_OF_A_CHAT = {"messages", "tools", "chat_template_kwargs"}


def missing_router(prefix: str) -> APIRouter:
    """Build OpenAI's routes that this service refuses in words."""
    router = APIRouter(prefix=prefix)
    for path, what in _NOT_HERE.items():
        router.add_api_route(path, _refuser(what), methods=["POST"])
    return router


def _refuser(what: str) -> Callable[[], Awaitable[Response]]:
    @speaks(dict[str, Any])
    async def refuse() -> Response:
        text = (
            f"this service has no {what}: it serves one language model, on /v1/chat/completions, /v1/completions and "
            "/v1/responses"
        )
        raise RequestRefused(404, text, code="not_supported")

    return refuse
