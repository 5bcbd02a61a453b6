"""`POST /generate` in the forms of vLLM's server and of SGLang; the body's fields tell which."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, BeforeValidator, Field, PlainValidator, model_validator

from tandem.serve.http.openapi_document import speaks
from tandem.serve.http.service import let_go
from tandem.serve.openai.choices import Choice, ChoiceDelta, SampleJob
from tandem.serve.openai.requests import Prompts, SamplingParams, checked, prompt_list, read
from tandem.serve.openai.routes import OpenAi
from tandem.serve.openai.strict import Strict

_DEFAULT_TOKENS = {"vllm": 16, "sglang": 128}
_OF_SGLANG = {"input_ids", "text", "sampling_params"}

# With these values the fields have no effect; any other value is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "detokenize": (True,), "frequency_penalty": (0,), "ignore_eos": (False,), "include_stop_str_in_output": (False,),
    "min_new_tokens": (0,), "min_p": (0,), "min_tokens": (0,), "no_stop_trim": (False,), "presence_penalty": (0,),
    "prompt_logprobs": (0,), "repetition_penalty": (1,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "stream": (False,),
}  # fmt: skip


def _all_tokens(top_k: Any) -> Any:
    return 0 if top_k == -1 else top_k


class _GenerateParams(SamplingParams):
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), BeforeValidator(_all_tokens)] = 0

    @model_validator(mode="before")
    @classmethod
    def _drop_engine_s_own(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("prompt_logprobs"):
            raise ValueError(
                "prompt_logprobs are not supported here; POST /v1/completions gives them; for distillation, give the "
                "run a teacher (algorithm.kind = 'distill')"
            )
        return {key: value for key, value in data.items() if value not in _NEUTRAL.get(key, ())}


def _one_prompt(prompt: Any) -> Any:
    """Return the prompt: a text, or ids from vLLM's wrapper."""
    given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) and len(prompt) == 1 else prompt
    if given and (isinstance(prompt, str) or (given is not prompt and _is_one(prompt_list(given)))):
        return given
    raise ValueError('must be a text, or {"prompt_token_ids": [...]}')


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], int)


class VllmBody(_GenerateParams):
    prompt: Annotated[str | list[int], PlainValidator(_one_prompt, json_schema_input_type=str | dict[str, list[int]])]
    logprobs: int | None = Field(None, ge=0, le=1)


class SglangKnobs(_GenerateParams):
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_new_tokens", "max_tokens"))
    seed: int | None = Field(None, ge=0, le=2**53, validation_alias=AliasChoices("sampling_seed", "seed"))


class SglangBody(Strict):
    text: Prompts | None = None
    input_ids: Prompts | None = None
    sampling_params: SglangKnobs = Field(default_factory=lambda: SglangKnobs.model_validate({}))
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    top_logprobs_num: int = Field(0, ge=0, le=0)
    logprob_start_len: int = Field(-1, ge=-1, le=-1)
    """Logprobs of the prompt are not supported."""
    stream: Literal[False] = False
    rid: str = ""

    @model_validator(mode="after")
    def _one_prompt(self) -> SglangBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("input_ids or text: send one of them")
        return self

    @property
    def several(self) -> bool:
        given = self._given
        return isinstance(given, list) and not isinstance(given[0], int)

    @property
    def prompts(self) -> list[Any]:
        given: Any = self._given
        return given if self.several else [given]

    @property
    def _given(self) -> Any:
        return self.input_ids if self.text is None else self.text


def _either(data: Any) -> SglangBody | VllmBody:
    if isinstance(data, dict) and _OF_SGLANG & data.keys():
        return checked(SglangBody, data)
    return checked(VllmBody, data)


class Generate:
    def __init__(self, api: OpenAi) -> None:
        self.api = api

    def router(self, prefix: str) -> APIRouter:
        router = APIRouter(prefix=prefix)
        router.add_api_route("/generate", self.generate, methods=["POST"])
        return router

    @speaks(VllmBody | SglangBody, several=True)  # SGLang's form, with several prompts or samples
    async def generate(self, request: Request) -> JSONResponse:
        asked = await read(request, _either)
        if isinstance(asked, SglangBody):
            return await self._sglang(request, asked)
        return await self._vllm(request, asked)

    async def _vllm(self, request: Request, asked: VllmBody) -> JSONResponse:
        given = asked.prompt
        job = await self._job(request, [given], asked, asked.max_tokens or _DEFAULT_TOKENS["vllm"])
        pieces = [choice.take() for choice in await self.api.whole(request, job, parts_thoughts=False)]
        body: dict[str, Any] = {
            "text": [piece.text for piece in pieces],
            "prompt": given if isinstance(given, str) else None,
            "finish_reasons": [piece.finish_reason for piece in pieces],
            "prompt_token_ids": job.prompts[0],
            "token_ids": [piece.ids for piece in pieces],
            "weight_versions": [_spans(piece) for piece in pieces],
        }
        if asked.logprobs is not None:
            body["logprobs"] = [[[{str(id): logprob}] for id, logprob in _tokens(piece)] for piece in pieces]
        return self._told(body, job)

    async def _sglang(self, request: Request, asked: SglangBody) -> JSONResponse:
        knobs = asked.sampling_params
        job = await self._job(request, asked.prompts, knobs, knobs.max_tokens or _DEFAULT_TOKENS["sglang"])
        choices = await self.api.whole(request, job, parts_thoughts=False)
        results = [self._result(choice, job, asked) for choice in choices]
        if not asked.several and len(results) == 1:
            return self._told(results[0], job)
        return JSONResponse(results, headers=self.api.headers(job))

    def _result(self, choice: Choice, job: SampleJob, asked: SglangBody) -> dict[str, Any]:
        piece = choice.take()
        place = job.opened.places[piece.index]
        meta: dict[str, Any] = {
            "id": place.id,
            "session_id": place.session,
            "finish_reason": {"type": piece.finish_reason},
            "prompt_tokens": len(place.prompt),
            "completion_tokens": len(piece.ids),
            "weight_version": str(choice.version),
            "weight_versions": _spans(piece),
        }
        if asked.return_logprob:
            names = self.api.renderer if asked.return_text_in_logprobs else None
            meta["output_token_logprobs"] = [
                [logprob, id, names.decode([id], skip_special=False) if names else None]
                for id, logprob in _tokens(piece)
            ]
        return {"text": piece.text, "output_ids": piece.ids, "meta_info": meta}

    async def _job(
        self, request: Request, prompts: list[str | list[int]], knobs: SamplingParams, max_tokens: int
    ) -> SampleJob:
        opened = await self.api.opened("prompt", self.api.conversations.text(request, prompts, knobs.n))
        let_go(request)
        job = SampleJob(opened, knobs.n, knobs.sampling(max_tokens))
        await self.api.check(request, job, "prompt")
        return job

    def _told(self, body: dict[str, Any], job: SampleJob) -> JSONResponse:
        if job.opened.session:
            body |= {"session_id": job.opened.session, "turn_ids": [place.id for place in job.opened.places]}
        return JSONResponse(body, headers=self.api.headers(job))


def _tokens(piece: ChoiceDelta) -> list[tuple[int, float]]:
    return list(zip(piece.ids, piece.logprobs, strict=True))


def _spans(piece: ChoiceDelta) -> list[list[int]]:
    return [[span.version, span.count] for span in piece.spans]
