"""vLLM as an Engine: token ids in, token ids out, and weights through what Tandem runs inside its workers.

consumes: prompts               waits for: vLLM's scheduler, and the gate while a version is exchanged
produces: completions           of one version each: requests end under the old one, or are asked again under the new

vLLM itself does not say on every version which weights made a token. So no request crosses an exchange: a version comes
beside the one that is served; the gate shuts, what runs ends (`finish`) or is ended and asked again (`restart`), the
workers copy the version over and read back what they serve, and the gate opens. What failed halfway stays shut: no torn
weights answer. Once begun, an exchange runs to its end, whoever gives it up: workers cannot be told to stop.

All requests come through this gate. So behind it, once those that were let in have ended, vLLM is idle, and need not be
paused itself: that takes it 20 ms. What it has cached is found by no request of another version (`cache_salt`).

Asleep, with `engine.sleep = "free"`, its weights are in the host's memory and its keys and values nowhere: nothing may
touch the GPU before they are back, and they are not called back before there is room.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from tandem.engine.pieces import whole
from tandem.engine.vllm_process import VllmProcess
from tandem.engine.vllm_sampled import SampledReader
from tandem.errors import EngineError, EngineLost, SyncError, SyncTimeout
from tandem.io.to_its_end import to_its_end
from tandem.ops.phases import Phases
from tandem.ops.sampled import MARK
from tandem.protocols import OnToken, WeightSource
from tandem.types import Completion, Fingerprints, FinishReason, Sampling, Served, Span

_log = logging.getLogger(__name__)

_CONTROL_S = 60.0  # for a call that moves no weights
_WATCH_S, _ABORT_AGAIN_S = 0.5, 0.1
_LOOK_S, _LOOK_MOST_S = 0.002, 0.05  # between looks whether a version has come
_STALL_S = 0.02  # that the engine's steps may wait for an adapter on its way
_BASE = "base"
_AT_THE_END = 2  # vLLM's RequestOutputKind.FINAL_ONLY: else it puts every token's answer together, to drop all but one
_ERRORS = {"sync": SyncError, "sync_timeout": SyncTimeout, "engine": EngineError}


class VllmEngine:
    def __init__(
        self,
        process: VllmProcess,
        *,
        end_ids: frozenset[int],
        num_ids: int,
        restarts: bool = False,
        version: int = -1,
    ) -> None:
        """`num_ids`: ids below it exist. `restarts`: requests under way are ended for a new version and asked again,
        not waited for."""
        self.version = version
        self.boot_id = uuid.uuid4().hex
        self.cache_epoch = 0
        self._process, self._end_ids, self._restarts = process, sorted(end_ids), restarts
        self._num_ids, self._prepared, self._preparing = num_ids, False, asyncio.Lock()
        self._sampled: SampledReader | None = None
        """What the workers keep of requests under way; None: they cannot, and `_why_streamed` says why."""
        self._why_streamed = ""
        self._model = _BASE
        """What requests name: the base, or the adapter of the version served."""
        self._gate = asyncio.Event()
        self._gate.set()
        self._torn = ""
        self._held = -1
        """The full version that the workers say they hold; -1: what they started with."""
        self._adapters: list[str] = []
        """That vLLM has loaded, and whose slots are ours to write over once nobody asks for them."""
        self._vllm_paused = False
        self._running: Counter[str] = Counter()
        self._moving_memory = asyncio.Lock()
        self._lent: list[int] = []
        """Bytes that each worker gave back to sleep; empty: awake."""
        self._source: WeightSource | None = None

    @property
    def receivers(self) -> int:
        return self._process.options.tensor_parallel

    @property
    def stays(self) -> bool:
        return True  # captured graphs point at it

    @property
    def lent_bytes(self) -> int:
        return sum(self._lent)

    @property
    def why_torn(self) -> str:
        """Empty if its weights are a version. Else it answers nobody, until a full version is loaded."""
        return self._torn and f"engine: it serves nothing until a version is loaded: {self._torn}"

    # --- sampling

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        await self._prepare()
        while True:
            while not self._gate.is_set():  # it may have shut again since who waits was told
                await self._gate.wait()
            if self._torn:
                raise EngineLost(self.why_torn)
            model = self._model
            self._running[model] += 1
            try:
                completion = await self._sample(prompt_ids, sampling, on_token)
            finally:
                self._running[model] -= 1
            if completion is not None:
                return completion

    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_token: OnToken | None
    ) -> Completion | None:
        """None if it was ended for the sake of an exchange, and is to be asked again."""
        if self._sampled is None or (sampling.stop and on_token is not None):
            # Where a text ends a completion only vLLM's server knows it: tokens come from there, one by one.
            return await self._sample_streaming(prompt_ids, sampling, on_token)
        return await self._sample_whole(self._sampled, prompt_ids, sampling, on_token)

    async def _sample_whole(
        self, sampled: SampledReader, prompt_ids: Sequence[int], sampling: Sampling, on_token: OnToken | None
    ) -> Completion | None:
        version = self.version
        tell = None if on_token is None else lambda token_id, logprob: on_token(token_id, logprob, version)
        end_ids = {*self._end_ids, *sampling.stop_ids}
        with sampled.request(sampling.max_tokens, end_ids, tell) as request:
            body = self._request(prompt_ids, sampling, version)
            body["stream"] = False
            del body["sampling_params"]["logprobs"]
            body["sampling_params"] |= {"output_kind": _AT_THE_END, "extra_args": {MARK: request.name}}
            choices = [choice async for choice in self._choices(body)]
            ids, reason = choices[0]["token_ids"], choices[0]["finish_reason"]
            if reason == "abort":
                return None
            finish = _finish(reason, len(ids))
            return Completion(ids, await sampled.logprobs(request, ids), [Span(version, len(ids))], finish)

    async def _sample_streaming(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_token: OnToken | None
    ) -> Completion | None:
        version = self.version
        ids: list[int] = []
        logprobs: list[float] = []
        reason = ""
        async for choice in self._choices(self._request(prompt_ids, sampling, version)):
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

    def _request(self, prompt_ids: Sequence[int], sampling: Sampling, version: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "token_ids": list(prompt_ids),
            "stream": True,
            "cache_salt": f"{self.boot_id}-{version}",  # a prefix of other weights is never found
            "sampling_params": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "seed": sampling.seed % 2**63,
                "stop": list(sampling.stop),
                "stop_token_ids": sorted({*self._end_ids, *sampling.stop_ids}),
                "include_stop_str_in_output": True,
                "logprobs": 0,
                "detokenize": bool(sampling.stop),  # only to find a text does vLLM need to write one
            },
        }

    async def _read_sampled(self, running: list[Any], ended: list[Any], dropped: list[str]) -> dict[str, Sequence[str]]:
        answers = await self._workers("tandem_sampled", running, ended, dropped, deadline_s=_CONTROL_S)
        return answers[0]["news"]  # the rank that vLLM itself takes tokens from

    async def _choices(self, request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        try:
            async with self._process.stream("/inference/v1/generate", request) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise EngineError(f"engine: vLLM refuses a request with {answer.status_code}: {text[:500]}")
                if not request["stream"]:
                    for choice in json.loads(await answer.aread())["choices"]:
                        yield choice
                    return
                async for line in answer.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    told = json.loads(line[6:])
                    if "error" in told:
                        raise EngineError(f"engine: vLLM ended a request: {told['error']}")
                    for choice in told["choices"]:
                        yield choice
        except httpx.HTTPError as error:
            raise EngineLost(f"engine: vLLM is gone: {error!r}") from error

    # --- weights

    async def attach(self, source: WeightSource) -> None:
        await self._prepare()
        answers = await self._workers("tandem_attach", dict(source.link), deadline_s=_CONTROL_S)
        first = answers[0]
        told = ("layout", "derived", "adapter_dtype", "handles", "base_memory", "versions", "digests")
        reply = {"boot_id": self.boot_id, "workers": len(answers), **{key: first[key] for key in told if key in first}}
        reply["places"] = [place for answer in answers for place in answer["places"]]
        reply["devices"] = [answer["device"] for answer in answers]
        why_not = self._why_streamed
        reply["sampled"] = {"requested": "kept", "engaged": not why_not, "why_not": why_not}
        if self._process.options.sleeps:
            why_not = self._process.options.why_awake
            reply["sleep"] = {"requested": "free", "engaged": not why_not, "why_not": why_not}
        if "pieces" in first:
            shapes = {name: shape for name, (_, shape) in first["layout"].items()}
            reply["base"] = whole([piece for answer in answers for piece in answer["pieces"]], shapes)
        source.attached(reply)
        self._source = source

    async def _prepare(self) -> None:
        """Before anything is sampled. vLLM's matrix may have more rows than there are tokens."""
        if self._prepared:
            return
        async with self._preparing:
            if self._prepared:
                return
            if self._num_ids:
                await self._workers("tandem_vocabulary", self._num_ids, deadline_s=_CONTROL_S)
            for answer in await self._workers("tandem_keep", deadline_s=_CONTROL_S):
                self._why_streamed = self._why_streamed or answer["why_not"]
            if self._why_streamed:
                _log.warning("vLLM's server sends every token by itself, which is slow: %s", self._why_streamed)
            else:
                self._sampled = SampledReader(self._read_sampled, self.boot_id)
            self._prepared = True

    async def load(self, version: int) -> Served:
        if self._source is None:
            raise SyncError("engine: load() before attach(): it does not know where weights come from")
        deadline_s = float(self._source.link["deadline_s"])
        if self._source.carries == "adapter":
            return await to_its_end(self._load_adapter(version, deadline_s))
        return await to_its_end(self._load_full(version, deadline_s, live=self._source.carries == "live"))

    async def _load_full(self, version: int, deadline_s: float, *, live: bool) -> Served:
        phases, lent_bytes = Phases(), self.lent_bytes
        try:
            await self._take_back()
            if lent_bytes:
                phases.end("wake")
            if self.receivers == 1 and not live:  # several could wait for each other, half in a step and half in this
                await self._until_here(version, deadline_s)
                phases.end("arrive")
            shut = time.perf_counter()
            await self._shut(deadline_s)
            phases.end("pause")
            answers, _ = await asyncio.gather(
                self._workers("tandem_load", version, "", None, True, deadline_s=deadline_s + _CONTROL_S),
                self._forget_cached(),
            )
            phases.end("load")
            self._torn, self._model, self._held = "", _BASE, version
            self._serve(version)
            await self._open()
            paused_s = time.perf_counter() - shut
            phases.end("resume")
            served = answers[0].get("fingerprints") or await self._proven(version)
        except BaseException as error:
            await self._after_failed_load(str(error) or type(error).__name__, live=live)
            raise
        phases.end("prove")
        return self._served(served, {**phases.seconds, **answers[0]["seconds"], "paused": paused_s}, lent_bytes)

    async def _until_here(self, version: int, deadline_s: float) -> None:
        """It comes while requests go on. Each look is a call between two steps, so they become rarer."""
        pause_s = _LOOK_S
        while True:
            answers = await self._workers("tandem_stage", version, 0.0, deadline_s=deadline_s)
            if all(each["arrived"] for each in answers):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LOOK_MOST_S)

    async def _forget_cached(self) -> None:
        """Of a version that is over nothing is found any more; its room is free at once."""
        await self._process.post("/reset_prefix_cache", deadline_s=_CONTROL_S)

    async def _proven(self, version: int) -> dict[str, str]:
        """What was read back, told when nobody waits for it."""
        return _whole(await self._workers("tandem_proof", version, deadline_s=_CONTROL_S))

    async def _load_adapter(self, version: int, deadline_s: float) -> Served:
        """Beside the one that is served, in a slot that nobody asks for: requests under way end with theirs."""
        phases, lent_bytes = Phases(), self.lent_bytes
        await self._take_back()
        if lent_bytes:
            phases.end("wake")
        if self._torn:
            raise SyncError(f"{self.why_torn}; an adapter does not mend what it stands upon: start the engine anew")
        try:
            seconds, served = await self._flip_adapter(version, deadline_s, phases)
        finally:
            await self._open()  # also after a failure: what was served before was not touched
        phases.end("resume")
        return self._served(served, {**phases.seconds, **seconds}, lent_bytes)

    async def _flip_adapter(
        self, version: int, deadline_s: float, phases: Phases
    ) -> tuple[Mapping[str, float], dict[str, str]]:
        slot = await self._free_slot(deadline_s)
        loaded = await self._loaded_adapter(version, slot, deadline_s)
        name, seconds = loaded[0]["adapter"], loaded[0]["seconds"]
        phases.end("load")
        if loaded[0]["loaded"]:
            served = _whole(loaded)
        else:
            if slot:  # it is of another form than what was there
                await self._drop(slot)
            self._adapters.append(name)
            await self._process.post(
                "/v1/load_lora_adapter", {"lora_name": name, "lora_path": f"tandem:{name}"}, deadline_s=deadline_s
            )
            phases.end("apply")
            served = _whole(await self._workers("tandem_adapter", name, deadline_s=deadline_s))
            phases.end("digest")
        if self._restarts:
            await self._shut(deadline_s)
        self._model = name
        self._serve(version)
        return seconds, served

    async def _loaded_adapter(self, version: int, slot: str, deadline_s: float) -> list[dict[str, Any]]:
        """It is let into a slot in the very call that finds it there; several workers first wait for each other."""
        if self.receivers > 1:
            await self._until_here(version, deadline_s)
        while True:
            arguments = (version, slot, None if self.receivers > 1 else _STALL_S)
            answers = await self._workers("tandem_load", *arguments, deadline_s=deadline_s + _CONTROL_S)
            if answers[0]["arrived"]:
                return answers
            await asyncio.sleep(_LOOK_S)

    async def _free_slot(self, deadline_s: float) -> str:
        """The adapter whose slot may be written over; none while there are slots that nothing is in. Were vLLM asked
        for one more than it has slots, it would move those in use in and out with every step."""
        if len(self._adapters) < self._process.options.adapter_slots:
            return ""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    if idle := next((each for each in self._adapters if self._is_idle(each)), ""):
                        return idle
                    if self._restarts:
                        await self._shut(deadline_s)
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise SyncTimeout(
                f"engine: requests of older versions use every slot for adapters ({len(self._adapters)}), and none "
                f"ended within {deadline_s:g} s; give it more (--adapter-slots), or set engine.on_update = 'restart'"
            ) from error

    def _is_idle(self, name: str) -> bool:
        return name != self._model and not self._running[name]

    async def _drop(self, name: str) -> None:
        self._adapters.remove(name)
        await self._process.post("/v1/unload_lora_adapter", {"lora_name": name}, deadline_s=_CONTROL_S)
        await self._workers("tandem_drop", name, deadline_s=_CONTROL_S)

    def _serve(self, version: int) -> None:
        self.version = version
        self.cache_epoch += 1

    def _served(self, fingerprints: Mapping[str, str], seconds: Mapping[str, float], lent_bytes: int) -> Served:
        return Served(self.version, fingerprints, (self.boot_id,), self.cache_epoch, seconds, lent_bytes=lent_bytes)

    async def _after_failed_load(self, why: str, *, live: bool) -> None:
        """The version before goes on serving, if no worker has written over it. Asleep, it sleeps on; so it does where
        the trainer may have written (`live`), until whoever looked at that wakes it."""
        if self._lent or live:
            return
        if not await self._untouched():
            return self._tear(why)
        try:
            await self._open()
        except EngineError as error:
            self._tear(str(error))

    def _tear(self, why: str) -> None:
        self._torn = why
        self._gate.set()  # to the error, not to wait for ever

    async def fingerprints(self) -> Fingerprints:
        """Of what is served, computed now: the version's tensors, as its proof names them."""
        what = ("tandem_digest",) if self._model == _BASE else ("tandem_adapter", self._model)
        return _whole(await self._workers(*what, deadline_s=_CONTROL_S))

    async def sleep(self) -> None:
        """What runs ends, what comes waits; and if it was started for that, its GPU's memory is free."""
        await self._shut(_CONTROL_S)
        if self._process.options.sleeps and not self._process.options.why_awake:
            await to_its_end(self._lend())

    async def wake(self) -> None:
        await self._take_back()
        await self._open()

    async def remember(self) -> None:
        """Somebody is about to write into this engine's memory; `intact` then tells whether they have."""
        await self._workers("tandem_remember", self._adapters, deadline_s=_CONTROL_S)

    async def intact(self) -> bool:
        answers = await self._workers("tandem_intact", self._adapters, deadline_s=_CONTROL_S)
        return all(answer["intact"] for answer in answers)

    async def lost(self) -> None:
        while self._process.running:
            await asyncio.sleep(_WATCH_S)

    async def close(self) -> None:
        if self._sampled is not None:
            await self._sampled.close()
        await self._process.close()

    # --- its memory

    async def _lend(self) -> None:
        async with self._moving_memory:
            if self._lent:
                return
            await self.remember()
            before = await self._free_bytes()
            self._lent = [0] * len(before)  # from here on it may be asleep, whatever is heard of it
            await self._process.post("/sleep", deadline_s=_CONTROL_S, level="1")
            self._lent = [max(0, now - was) for now, was in zip(await self._free_bytes(), before, strict=True)]
            _log.info("asleep: %.2f GiB of GPU memory are free for others", self.lent_bytes / 2**30)

    async def _take_back(self) -> None:
        await to_its_end(self._wake_up())

    async def _wake_up(self) -> None:
        """EngineError while there is no room: it sleeps on, and may be asked again."""
        async with self._moving_memory:
            if not self._lent:
                return
            for needed, free in zip(self._lent, await self._free_bytes(), strict=True):
                if free < needed:
                    raise EngineError(
                        f"engine: it gave {needed / 2**30:.2f} GiB of its GPU away to sleep, and of them "
                        f"{free / 2**30:.2f} are free now; set a smaller engine.memory_share, or let the trainer keep "
                        "less between steps"
                    )
            try:
                await self._process.post("/wake_up", deadline_s=_CONTROL_S)
            except EngineError:
                await self._process.end()  # half of its memory is there: no vLLM gets over that
                raise
            self._lent = []
            await self._look_after_sleep()

    async def _look_after_sleep(self) -> None:
        """Raises unless its weights are known to be what they were: it is awake, but nobody may answer with them."""
        try:
            if not await self.intact():
                raise EngineError("engine: its weights are not what they were before it slept; load a version")
        except BaseException as error:
            self._tear(self._torn or str(error) or type(error).__name__)
            raise

    async def _free_bytes(self) -> list[int]:
        return [answer["free"] for answer in await self._workers("tandem_free_bytes", deadline_s=_CONTROL_S)]

    # --- the gate

    async def _shut(self, deadline_s: float) -> None:
        """Afterwards nothing runs, and nothing waits inside vLLM. What is to be asked again is ended as often as more
        of it has come: a request that reaches a vLLM which is paused waits there for the end of the pause."""
        self._gate.clear()
        try:
            async with asyncio.timeout(deadline_s):
                if not self._restarts:
                    await self._none_runs()
                while self._running.total():
                    self._vllm_paused = True  # whatever is heard of it
                    await self._process.post("/pause", deadline_s=deadline_s, mode="abort", clear_cache="true")
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_ABORT_AGAIN_S):
                            await self._none_runs()
        except TimeoutError as error:
            raise SyncTimeout(f"engine: what it was asked did not end within {deadline_s:g} s") from error

    async def _none_runs(self) -> None:
        while self._running.total():
            await asyncio.sleep(0.001)

    async def _open(self) -> None:
        if self._vllm_paused:
            await self._process.post("/resume", deadline_s=_CONTROL_S)
            self._vllm_paused = False
        self._gate.set()

    async def _untouched(self) -> bool:
        """Whether a load that failed left the version before as it was, in every worker."""
        try:
            answers = await self._workers("tandem_status", deadline_s=_CONTROL_S)
        except (SyncError, EngineError):
            return False
        return all(answer["untouched"] and answer["version"] == self._held for answer in answers)

    async def _workers(self, method: str, *args: Any, deadline_s: float) -> list[dict[str, Any]]:
        """What each worker answers; the first error that one of them tells of."""
        if self._lent and method not in ("tandem_free_bytes", "tandem_status"):
            raise EngineError(f"engine: it is asleep, and its weights are not on the GPU; {method} has to wait")
        body = {"method": method, "args": list(args), "timeout": deadline_s}
        answers = (await self._process.post("/collective_rpc", body, deadline_s=deadline_s))["results"]
        for answer in answers:
            if told := answer.get("error"):
                raise _ERRORS.get(told["code"], EngineError)(told["message"])
        return answers


def _finish(reason: str, num_ids: int) -> FinishReason:
    if reason not in ("stop", "length") or not num_ids:
        raise EngineError(f"engine: vLLM ended a request with {reason!r} after {num_ids} tokens")
    return "stop" if reason == "stop" else "length"


def _whole(answers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return whole([piece for answer in answers for piece in answer["pieces"]], answers[0]["shapes"])
