"""vLLM as an Engine: it samples token ids, and Tandem's code inside its workers updates the weights.

consumes: prompts               waits for: vLLM's scheduler, and the gate while a version is put in place
produces: completions           with the version that made each token

engine/vllm/weight_update.py knows the version and admits requests. No request finds cached keys and values of another
version: vLLM's cache is cleared at each update, and each version has its own `cache_salt`. If the workers can record
sampled tokens, a request's answer has only token ids, and the logprobs are read from the workers
(engine/vllm/token_reader.py), and the requests of one moment are sent together (engine/vllm/requests_together.py).
Otherwise vLLM's server streams every token, which is slower.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tandem.engine.http.server_sent_events import server_sent
from tandem.engine.vllm.image_features import ImageFeatures
from tandem.engine.vllm.named_adapters import NamedAdapters
from tandem.engine.vllm.process import VllmProcess
from tandem.engine.vllm.requests_together import RequestsTogether
from tandem.engine.vllm.token_reader import TokenReader
from tandem.engine.vllm.weight_update import BASE, WeightUpdate
from tandem.errors import EngineError, SamplingRefused, SyncError
from tandem.io.engine_messages import decoded
from tandem.ops.option_report import requested
from tandem.ops.vllm_token_protocol import MARK, URGENT
from tandem.protocols import ImageSource, OnToken, WeightSource
from tandem.spec.bridges import traits_of
from tandem.types import Completion, Fingerprints, FinishReason, OnUpdate, Sampling, Served, Shape, Span

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_WATCH_S = 0.5
_AT_THE_END = 2  # vLLM's RequestOutputKind.FINAL_ONLY: otherwise vLLM would build an output for every token


class VllmEngine:
    def __init__(
        self,
        process: VllmProcess,
        *,
        end_ids: frozenset[int],
        num_ids: int,
        on_update: Literal["auto", OnUpdate] = "auto",
        version: int = -1,
        images: ImageSource | None = None,
    ) -> None:
        """`num_ids`: size of the vocabulary. `on_update`: what happens to requests in flight when a version arrives;
        auto: `continue` if that is possible, otherwise `finish`. `images`: of the run, if its model sees."""
        exchange = WeightUpdate(process, "continue" if on_update == "auto" else on_update, version)
        self._process, self._exchange, self._on_update = process, exchange, on_update
        self._named = NamedAdapters(exchange, process.options.adapter_slots)
        self._end_ids, self._num_ids = sorted(end_ids), num_ids
        self._images = None if images is None else ImageFeatures(images, process.options.dtype)
        self._prepared, self._preparing = False, asyncio.Lock()
        self._sampled: TokenReader | None = None
        """Reads the tokens that the workers record; None if they cannot, and `_why_streamed` says why."""
        self._together: RequestsTogether | None = None
        """Where tokens are read so."""
        self._why_streamed = ""

    # --- sampling

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
        adapter: str = "",
    ) -> Completion:
        """`adapter`: the name of one that was put beside the served version; empty: that version answers."""
        if why := self.why_not(sampling):
            raise SamplingRefused(why)
        await self._prepare()
        # Only vLLM's server knows when a stop string ends a completion, so such requests are streamed.
        streamed = sampling.shape.engaged or (sampling.stop and on_token is not None)
        sampled = None if streamed else self._sampled
        more: dict[str, Any] = {}
        if sampling.images:
            assert self._images is not None  # or why_not() says so
            features = await asyncio.to_thread(self._images.of, prompt_ids, sampling.images)
            more = {"features": features, "return_token_ids": True}
        while True:
            named = partial(self._named.model, adapter) if adapter else None
            async with self._exchange.admitted(may_be_held=sampled is not None, model=named) as model:
                if sampled is None:
                    completion = await self._sample_streaming(model, prompt_ids, sampling, on_token, more)
                else:
                    completion = await self._sample_whole(sampled, model, prompt_ids, sampling, on_token, more)
            if completion is not None:  # otherwise an update aborted the request, and it is repeated
                return completion

    def why_not(self, sampling: Sampling) -> str:
        """Return why it cannot sample so; empty if it can. vLLM itself refuses a schema that it cannot follow."""
        grammar = sampling.shape.grammar
        if sampling.images and self._images is None:
            return "images: this vLLM was started without the images of a run, or for a model that does not see"
        if sampling.top_logprobs:
            return "top_logprobs: tokens of vLLM come with the logprob of the sampled one alone"
        if grammar is not None and not grammar.json_schema:
            return f"{grammar.field}: vLLM takes JSON schemas only, and neither calls of tools nor their mixture"
        if grammar is not None and grammar.after:
            return f"{grammar.field}: with thoughts, vLLM would force the thought to follow it; switch them off"
        return ""

    async def _prepare(self) -> None:
        """Prepare the workers before the first sample. vLLM's output matrix may have more rows than there are
        tokens."""
        if self._prepared:
            return
        async with self._preparing:
            if self._prepared:
                return
            if self._num_ids:
                await self._exchange.workers("tandem_vocabulary", self._num_ids)
            for answer in await self._exchange.workers("tandem_keep", self.version):
                self._why_streamed = self._why_streamed or answer["why_not"]
            if self._why_streamed:
                _log.warning("vLLM's server sends every token by itself, which is slow: %s", self._why_streamed)
            else:
                self._sampled = TokenReader(self._read_sampled, self.boot_id)
                self._together = RequestsTogether(self._process)
            self._prepared = True

    async def _sample_whole(
        self, sampled: TokenReader, model: str, prompt_ids: Sequence[int], sampling: Sampling,
        on_token: OnToken | None, more: Mapping[str, Any],
    ) -> Completion | None:  # fmt: skip
        version, of_base = self.version, model == BASE  # the workers count versions of the base

        def tell(token_id: int, logprob: float, served: int) -> None:
            assert on_token is not None
            on_token(token_id, logprob, served if of_base else version)

        end_ids = {*self._end_ids, *sampling.stop_ids}
        with sampled.request(sampling.max_tokens, end_ids, tell if on_token else None) as request:
            body = {**self._request(model, prompt_ids, sampling, version), **more}
            del body["stream"], body["sampling_params"]["logprobs"]
            body["sampling_params"]["extra_args"][MARK] = request.name
            # Features of images need vLLM's own route, and an urgent request goes alone.
            if self._together is None or more or sampling.urgent:
                body["sampling_params"]["output_kind"] = _AT_THE_END
                (answer,) = [choice async for choice in self._choices({**body, "stream": False})]
            else:
                answer = await self._together.ask({**body, "name": request.name})
            ids, reason = answer["token_ids"], answer["finish_reason"]
            if reason == "abort":
                return None
            finish, logprobs = _finish(reason, len(ids)), await sampled.logprobs(request, ids)
            return Completion(ids, logprobs, request.spans if of_base else [Span(version, len(ids))], finish)

    async def _sample_streaming(
        self, model: str, prompt_ids: Sequence[int], sampling: Sampling,
        on_token: OnToken | None, more: Mapping[str, Any],
    ) -> Completion | None:  # fmt: skip
        version = self.version
        ids: list[int] = []
        logprobs: list[float] = []
        reason = ""
        async for choice in self._choices({**self._request(model, prompt_ids, sampling, version), **more}):
            new = choice["token_ids"]
            content = (choice.get("logprobs") or {}).get("content") or []
            if len(content) != len(new):
                raise EngineError(f"engine: vLLM sent {len(new)} tokens with {len(content)} logprobs")
            for token_id, each in zip(new, content, strict=True):
                ids.append(token_id)
                logprobs.append(float(each["logprob"]))
                if on_token is not None:
                    on_token(token_id, logprobs[-1], version)
            reason = choice.get("finish_reason") or reason
        if reason == "abort":
            return None
        return Completion(ids, logprobs, [Span(version, len(ids))], _finish(reason, len(ids)))

    def _request(self, model: str, prompt_ids: Sequence[int], sampling: Sampling, version: int) -> dict[str, Any]:
        return {
            "model": model,
            "token_ids": list(prompt_ids),
            "stream": True,
            "cache_salt": f"{self.boot_id}-{version}-{model}",  # so that no cached prefix of other weights is used
            "sampling_params": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "seed": sampling.seed % 2**63,
                "stop": list(sampling.stop),
                "stop_token_ids": sorted({*self._end_ids, *sampling.stop_ids}),
                "ignore_eos": True,  # stop_token_ids is complete; vLLM would add ids of generation_config.json
                "include_stop_str_in_output": True,
                "logprobs": 0,
                "detokenize": bool(sampling.stop),  # vLLM needs text only to find stop strings
                "extra_args": {URGENT: True} if sampling.urgent else {},
                **_shape(sampling.shape),
            },
        }

    async def _read_sampled(self, running: list[Any], ended: list[Any], dropped: list[str]) -> dict[str, Sequence[Any]]:
        answers = await self._exchange.workers("tandem_sampled", running, ended, dropped)
        return answers[0]["news"]  # the rank whose tokens vLLM uses

    async def _choices(self, request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        urgent = URGENT in request["sampling_params"]["extra_args"]
        async with self._process.stream("/inference/v1/generate", request, urgent=urgent) as answer:
            if answer.status != 200:
                text = (await answer.whole()).text
                raise self._process.refusal("a request", answer.status, text)
            if not request["stream"]:
                told = decoded((await answer.whole()).content)
                _check_prompt(request, told)
                for choice in told["choices"]:
                    yield choice
                return
            async for data in server_sent(answer.pieces(), "engine: vLLM"):
                if data == b"[DONE]":
                    continue
                told = decoded(data)
                if "error" in told:
                    raise EngineError(f"engine: vLLM ended a request: {told['error']}")
                _check_prompt(request, told)
                for choice in told["choices"]:
                    yield choice

    # --- weights

    async def attach(self, source: WeightSource) -> None:
        await self._prepare()
        told = {
            "sampled": requested("kept", self._why_streamed),
            "requests": requested("together", self._why_streamed),
            "scheduler": requested("in bulk", self._process.why_not_in_bulk),
        }
        why_not = self._why_none_is_held(source)
        if self._on_update == "continue":
            told["on_update"] = requested("continue", why_not)
        elif self._on_update == "auto":
            told["on_update"] = requested("auto", "", note=f"finish, for {why_not}" if why_not else "continue")
        if not self._process.options.eager:
            told["compiled"] = requested("by form", self._process.why_not_found_again)
        await self._exchange.attach(source, told)

    def _why_none_is_held(self, source: WeightSource) -> str:
        if source.carries == "adapter":
            return "requests end under the adapter that they began with"
        if (traits := traits_of(source.link)) is not None and traits.restarts_engine:
            return "the next version is served by a new process"
        if self._exchange.gives_memory:
            return "it frees its memory to sleep, and first waits for all requests"
        return self._why_streamed

    async def load(self, version: int) -> Served:
        if len(self._named):
            raise SyncError("engine: it serves adapters of the base that it has; drop them before another version")
        return await self._exchange.load(version)

    async def put_adapter(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], expected: Fingerprints | None = None
    ) -> None:
        """Serve an adapter of this base under a name, beside the others. `tensors`: under PEFT's names, B scaled;
        `expected`: their fingerprints, or None to take them here."""
        await self._prepare()
        await self._named.put(name, tensors, config, expected)

    async def drop_adapter(self, name: str) -> None:
        """Serve an adapter no more. EngineError while a request uses it."""
        await self._named.drop(name)

    async def fingerprints(self) -> Fingerprints:
        return await self._exchange.fingerprints()

    async def remember(self) -> None:
        await self._exchange.remember()

    async def intact(self) -> bool:
        return await self._exchange.intact()

    async def sleep(self) -> None:
        await self._exchange.sleep()

    async def wake(self) -> None:
        await self._exchange.wake()

    @property
    def version(self) -> int:
        return self._exchange.version

    @property
    def boot_id(self) -> str:
        return self._exchange.boot_id

    @property
    def cache_epoch(self) -> int:
        return self._exchange.cache_epoch

    @property
    def receivers(self) -> int:
        return self._exchange.receivers

    @property
    def lent_bytes(self) -> int:
        return self._exchange.lent_bytes

    @property
    def why_torn(self) -> str:
        return self._exchange.why_torn

    @property
    def stays(self) -> bool:
        return True  # captured graphs point at the weights

    # --- its process

    async def lost(self) -> None:
        while self._process.running:
            await asyncio.sleep(_WATCH_S)

    async def close(self) -> None:
        for each in (self._together, self._sampled):
            if each is not None:
                await each.close()
        await self._process.close()


def _shape(shape: Shape) -> dict[str, Any]:
    """Return vLLM's names of what changes something."""
    if not shape.engaged:
        return {}
    named = {
        "min_p": shape.min_p,
        "repetition_penalty": shape.repetition_penalty,
        "frequency_penalty": shape.frequency_penalty,
        "presence_penalty": shape.presence_penalty,
    }
    bias = {"logit_bias": dict(shape.logit_bias)} if shape.logit_bias else {}
    form = {"structured_outputs": {"json": shape.grammar.json_schema}} if shape.grammar is not None else {}
    return {**named, **bias, **form}


def _check_prompt(request: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Raise EngineError if vLLM tells of another prompt than the one with images that it was given."""
    if told.get("prompt_token_ids") not in (None, request["token_ids"]):
        raise EngineError("engine: vLLM changed the tokens of a prompt with images")


def _finish(reason: str, num_ids: int) -> FinishReason:
    if reason not in ("stop", "length") or not num_ids:
        raise EngineError(f"engine: vLLM ended a request with {reason!r} after {num_ids} tokens")
    return "stop" if reason == "stop" else "length"
