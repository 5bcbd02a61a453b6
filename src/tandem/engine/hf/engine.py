"""The embedded engine: continuous batching on the trainer's own module, in this process.

consumes: prompts                waits for: a free row, and wake() while it sleeps
produces: completions            one iteration at a time: prefill new requests, or decode one token in every live row

Weights change only between two iterations. `on_update` says what happens to requests in flight when a version arrives:
they continue with a recomputed kv cache, they finish under the old version first, or they restart. A request may choose
for itself. A pinned request ends on a twin of the module that shares the old weights' memory
(engine/hf/shared_copy.py). In each case a token's logprob is exact for the version of its span.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.engine.hf.admission_queue import AdmissionQueue, QueuedRequest
from tandem.engine.hf.cache_room import CacheRoom, cache_room
from tandem.engine.hf.passes import Passes
from tandem.engine.hf.sampler import draw
from tandem.engine.hf.shaping import GrammarCompiler, Shaper, likeliest
from tandem.engine.hf.shared_copy import twin
from tandem.engine.hf.staged_weights import StagedWeights
from tandem.errors import EngineError, SamplingRefused, SyncError
from tandem.ops import attention_masks, digest
from tandem.ops.device_names import device_name
from tandem.ops.image_places import why_misplaced
from tandem.ops.lm_head import Head
from tandem.ops.named_tensors import live_tensors
from tandem.ops.phase_timer import Phases
from tandem.ops.vision import Vision
from tandem.protocols import OnToken, WeightSource
from tandem.types import Alternatives, Completion, Fingerprints, FinishReason, OnUpdate, Sampling, Served

_log = logging.getLogger(__name__)

# Most positions in one prefill, padding included. On a CPU activations should stay in its cache: 1,024 was 1.3 times
# as fast as 2,048 (docs/LOG.md). Elsewhere it bounds memory.
_PREFILL_TOKENS = {"cpu": 1024}
_DRAIN_POLL_S = 0.002
_MAX_TWINS = 3  # old versions in memory at a time, for requests that are pinned to them


class EmbeddedEngine:
    """The embedded engine. `inline` runs the model on the event loop's thread, which makes the order of work fixed."""

    def __init__(
        self,
        module: Any,
        *,
        num_ids: int,
        end_ids: frozenset[int],
        decode: Callable[[list[int]], str],
        max_running: int = 256,
        max_context: int = 0,
        kv_gib: float = 4.0,
        inline: bool = True,
        on_update: OnUpdate = "continue",
        grammars: GrammarCompiler | None = None,
        eager: bool = True,
        vision: Vision | None = None,
        room: CacheRoom | None = None,
    ) -> None:
        """`grammars`: for requests with a grammar; None refuses them. `eager`: decode steps have masks, and no pass is
        a CUDA graph. `vision`: for requests with images; None refuses them. `room`: of a twin, whose module is a copy
        of one that was checked already."""
        attention_masks.check_attention(module.config)
        self.version = -1
        self.boot_id = uuid.uuid4().hex
        self.cache_epoch = self.lent_bytes = 0
        config = module.config.get_text_config()
        self.max_context: int = max_context or config.max_position_embeddings
        self._module, self._head, self._config = module, Head(module, num_ids, vision), module.config
        self._vision = vision
        first: Tensor = next(module.parameters())
        self._device = first.device
        if room is None:
            self._head.check(module)
            room = cache_room(self._head, kv_gib, max_running, first)
        self._twins: dict[EmbeddedEngine, asyncio.Task[None]] = {}
        self._make_twin = partial(
            EmbeddedEngine, num_ids=num_ids, end_ids=end_ids, decode=decode, max_context=max_context, inline=inline,
            grammars=grammars, vision=vision, room=room,
        )  # fmt: skip
        self._end_ids, self._decode, self._inline, self._grammars = end_ids, decode, inline, grammars
        most = min(self.max_context, getattr(config, "max_position_embeddings", self.max_context))
        self.passes = Passes(module, self._head, room, self._device, most_positions=most, eager=eager)
        self._kv_positions = room.positions
        self._waiting = AdmissionQueue(
            max_running=room.max_running, positions=self._kv_positions,
            prefill_tokens=_PREFILL_TOKENS.get(self._device.type, 16384),
        )  # fmt: skip
        self._running: list[QueuedRequest] = []
        self._adapters = self.passes.adapters
        self._holding, self._on_update, self._draining = StagedWeights(module), on_update, False
        self._source: WeightSource | None = None
        self._pump: asyncio.Task[None] | None = None
        self._why, self._stopped = "closed", asyncio.Event()
        self._work, self._awake, self._iterating = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._awake.set()

    # --- the protocol

    @property
    def receivers(self) -> int:
        return 1

    @property
    def stays(self) -> bool:
        """Whether the weights stay at the same addresses. On a CPU they move into new memory for each trainer."""
        return self._device.type != "cpu"

    @property
    def why_torn(self) -> str:
        return ""  # a version is complete before it is served; WeightControl checks writes from other processes

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
        adapter: str = "",
    ) -> Completion:
        """`adapter`: the name of one that was added; empty: the base answers."""
        self._refuse_what_does_not_fit(prompt_ids, sampling)
        self._refuse_images(prompt_ids, sampling)
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name="engine")
            self._pump.add_done_callback(lambda pump: self._stopped.set())
        if self._pump.done():
            raise EngineError(f"engine: it has stopped: {self._why}")
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        stop_ids = self._end_ids.union(sampling.stop_ids) if sampling.stop_ids else self._end_ids
        if adapter and adapter not in self._adapters.names:
            raise EngineError(f"engine: there is no adapter '{adapter}'")
        shaper = self._shaper(prompt_ids, sampling)
        self._waiting.add(
            QueuedRequest(list(prompt_ids), sampling, stop_ids, answer, on_token, shaper=shaper, adapter=adapter)
        )
        self._work.set()
        return await answer  # if it is cancelled, the row is freed before the next iteration

    def _shaper(self, prompt_ids: Sequence[int], sampling: Sampling) -> Shaper | None:
        if not sampling.shape.engaged:
            return None
        if why := self.why_not(sampling):
            raise SamplingRefused(why)
        grammar = sampling.shape.grammar
        matcher = self._grammars.matcher(grammar) if grammar is not None and self._grammars is not None else None
        return Shaper(sampling, prompt_ids, matcher)

    def why_not(self, sampling: Sampling) -> str:
        """Return why it cannot sample so; empty if it can. Compiles the grammar, and keeps it."""
        if sampling.images and self._vision is None:
            return "images: this engine takes text only"
        grammar = sampling.shape.grammar
        if grammar is None:
            return ""
        why = "this engine has no grammars" if self._grammars is None else self._grammars.why_not(grammar)
        return why and f"{grammar.field}: {why}"

    async def put_adapter(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], expected: Fingerprints | None = None
    ) -> None:
        """Serve an adapter of this base under a name, beside the others. `tensors`: under PEFT's names, B scaled;
        `expected`: their fingerprints, or None to take them here."""
        if self._vision is not None and (odd := [each for each in tensors if ".visual." in each]):
            raise SyncError(f"adapter '{name}': '{odd[0]}' is of the vision tower, which stays as it is")
        if expected is None:
            expected = await self._call(self.host_fingerprints, tensors)
        async with self._iterating:  # between two iterations, as weights change
            await self._call(self._adapters.put, name, tensors, config, expected)

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return memory on the host that an adapter is read into. A GPU copies from it at full speed, and torch keeps
        it for the next one."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def host_fingerprints(self, tensors: Mapping[str, Tensor]) -> Fingerprints:
        """Return what `put_adapter` is to expect of tensors on the host."""
        return digest.fingerprints_of_host(tensors, self._device)

    async def drop_adapter(self, name: str) -> None:
        """Serve an adapter no more. EngineError while a request uses it."""
        async with self._iterating:
            if any(request.adapter == name for request in (*self._running, *self._waiting)):
                raise EngineError(f"engine: adapter '{name}' answers a request now")
            await self._call(self._adapters.drop, name)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Of text alone."""
        self._refuse_what_does_not_fit(ids, Sampling(max_tokens=0))
        if self._vision is not None and self._vision.images.pad_id in ids:
            raise EngineError("engine: these ids have a place of an image, and only text is scored")
        if len(ids) == 1:
            return []
        while True:
            await self._awake.wait()
            async with self._iterating:  # between two iterations, as weights change
                if self._awake.is_set():
                    return await self._call(self.passes.score, list(ids))

    async def attach(self, source: WeightSource) -> None:
        self._source = source
        if (home := source.memory_for(dict(live_tensors(self._module)))) is not None:
            await self.sleep()
            self._holding.live_in(home)
            self.passes.weights_at(self._holding.addresses())
            await self.wake()
        reply: dict[str, Any] = {"boot_id": self.boot_id, "workers": 1, "layout": self._holding.layout()}
        reply["devices"] = [device_name(self._device)]
        reply["digests"] = digest.fused(next(self._module.parameters()).device)
        reply |= self.passes.report
        if source.carries == "adapter":
            reply["base"] = await self._call(self._holding.fingerprints)
        source.attached(reply)

    async def load(self, version: int) -> Served:
        if self._source is None:
            raise SyncError("engine: load() before attach(): the source of weights is unknown")
        if self._adapters.names:
            raise SyncError("engine: it serves adapters of the base that it has; drop them before another version")
        phases = Phases()
        if self._source.carries == "live":
            await self.sleep()  # the trainer may have written already
        try:
            weights = await self._call(self._source.receive, version)  # it waits for the other end
            phases.end("wait")
            staged = await self._call(self._holding.stage, weights, phases)
            old = await self._twin_for_pinned()
            await self._pause_for_update()
            phases.end("pause")
            served = self._holding.flip(staged)
            self.passes.weights_at(self._holding.addresses())
            self._forget(old)
            self.version = weights.version
            phases.end("apply")
        finally:
            self._draining = False
            await self.wake()  # even after a refusal: requests in flight continue with the old version
        return Served(self.version, served, (self.boot_id,), self.cache_epoch, phases.seconds)

    async def _pause_for_update(self) -> None:
        if self._on_update == "finish" and self._awake.is_set():
            self._draining = True
            while self._running:
                self._work.set()
                await asyncio.sleep(_DRAIN_POLL_S)
        await self.sleep()

    async def _twin_for_pinned(self) -> EmbeddedEngine | None:
        """Return a twin with the current weights if any request is pinned to them. Called before the flip."""
        while len(self._twins) >= _MAX_TWINS:
            await asyncio.wait(self._twins.values(), return_when=asyncio.FIRST_COMPLETED)
        if not any(request.sampling.on_update == "pin" for request in (*self._running, *self._waiting)):
            return None
        return self._make_twin(await self._call(twin, self._module))

    def _forget(self, old: EmbeddedEngine | None = None) -> None:
        """Drop the kv cache of the old weights and put running requests back for another prefill. Move pinned requests
        to the twin `old`; requests that came after the twin was made stay here."""
        begun = [*self._running, *(request for request in self._waiting if request.ids)]
        own: dict[str, str] = {"continue": "follow", "finish": "follow", "restart": "restart"}
        pinned: list[QueuedRequest] = []
        for request in begun:
            match request.sampling.on_update or own[self._on_update]:
                case "restart":
                    request.begin_again()
                case "pin" if old is not None:
                    pinned.append(request)
                case _:
                    pass
        self._waiting.put_back(self._running)
        if pinned and old is not None:
            self._waiting.keep(lambda request: request not in pinned)
            self._twins[old] = asyncio.create_task(old.answer_all(pinned, self.version), name="pinned requests")
            self._twins[old].add_done_callback(lambda _: self._twins.pop(old))
        self._running = []
        self.cache_epoch += 1

    def beside(self, tensors: Mapping[str, Tensor], version: int) -> EmbeddedEngine:
        """Return an engine of another version, on a twin of this module. `tensors`: those that differ."""
        module = twin(self._module)
        parameters = dict(module.named_parameters())
        for name, tensor in tensors.items():
            parameters[name].data = tensor.to(parameters[name].device, parameters[name].dtype)
        other = self._make_twin(module)
        other.version = version
        return other

    async def answer_all(self, requests: list[QueuedRequest], version: int) -> None:
        """Answer these requests as a twin, then close."""
        self.version = version
        self._waiting.put_back(requests)
        self._pump = asyncio.create_task(self._run(), name=f"engine of version {version}")
        self._work.set()
        await asyncio.wait([request.answer for request in requests])
        await self.close()

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args) if self._inline else await asyncio.to_thread(function, *args)

    async def fingerprints(self) -> Fingerprints:
        """Compute fingerprints of the served weights now."""
        return await self._call(self._holding.fingerprints)

    async def remember(self) -> None:
        """Record what this engine's memory holds before a trainer may write into it; `intact` compares."""
        await self._call(self._holding.remember)

    async def intact(self) -> bool:
        return await self._call(self._holding.intact)

    async def lost(self) -> None:
        await self._stopped.wait()

    async def sleep(self) -> None:
        self._awake.clear()
        async with self._iterating:  # waits for the current iteration, which reads the weights
            pass

    async def wake(self) -> None:
        self._awake.set()
        self._work.set()  # for requests that waited while others finished

    async def close(self) -> None:
        for each in [*self._twins.values()]:
            each.cancel()
        for each in [*self._twins]:
            await each.close()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        self._fail_all(EngineError("engine: closed"))

    # --- the pump

    async def _run(self) -> None:
        wave: list[QueuedRequest] = []
        try:
            while True:
                await self._work.wait()
                await self._let_requests_gather()
                await self._awake.wait()
                async with self._iterating:
                    if not self._awake.is_set():
                        continue
                    self._forget_cancelled()
                    if not self._waiting and not self._running:
                        self._work.clear()
                        continue
                    self._make_room()
                    wave = [] if self._draining else self._waiting.next_wave(self._running)
                    if not wave and not self._running:  # drained
                        self._work.clear()
                        continue
                    if self._inline:
                        drawn = self._forward(wave)
                    else:
                        drawn = await asyncio.to_thread(self._forward, wave)
                    self._deliver(*drawn)
        except Exception as error:  # noqa: BLE001 - whatever the model raised belongs to those who wait for an answer
            _log.exception("the engine stopped")
            self._why = f"{type(error).__name__}: {error}"
            self._waiting.put_back(wave)  # the wave was taken from the queue, but not added to the running requests
            self._fail_all(EngineError(f"engine: stopped by {self._why}"))

    def _make_room(self) -> None:
        """Put one running request back if the queue needs its row. It keeps its tokens, and is prefilled with them
        later."""
        if not self._draining and (request := self._waiting.makes_room(self._running)) is not None:
            row = self._running.index(request)
            self._waiting.put_back([request])
            self._close_gaps([row])

    async def _let_requests_gather(self) -> None:
        """Let a few turns of the event loop pass, so that requests that were started together share a wave."""
        for _ in range(8):
            before = len(self._waiting)
            await asyncio.sleep(0)
            if len(self._waiting) == before:
                return

    @torch.inference_mode()
    def _forward(self, wave: list[QueuedRequest]) -> tuple[int, list[int], list[float], Mapping[int, Alternatives]]:
        """Run one iteration. Return the first row with a new token, the ids and logprobs from that row on, and the
        likeliest tokens of the rows whose requests ask for them."""
        if wave:
            first, logits_SV = len(self._running), self.passes.prefill(wave, self._running)
            self._running.extend(wave)
        else:
            first, logits_SV = 0, self.passes.decode(self._running)
        rows = slice(first, len(self._running))
        for row, request in enumerate(self._running[rows]):
            if request.shaper is not None:
                logits_SV[row] = request.shaper.shaped(logits_SV[row], request.ids)
        state = self.passes.state
        ids_S, logprobs_S, logprobs_SV = draw(
            logits_SV, state.settings.rows(rows.start, rows.stop), state.drawn_S[rows]
        )
        state.last_S[rows] = ids_S
        state.drawn_S[rows] += 1
        ranked = {
            first + row: likeliest(logprobs_SV[row], request.sampling.top_logprobs)
            for row, request in enumerate(self._running[rows])
            if request.sampling.top_logprobs
        }
        return first, ids_S.tolist(), logprobs_S.tolist(), ranked

    def _deliver(self, first: int, ids: list[int], logprobs: list[float], ranked: Mapping[int, Alternatives]) -> None:
        ended: list[int] = []
        for offset, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            request = self._running[first + offset]
            if logprob != logprob or logprob == float("-inf"):
                if not request.adapter:
                    raise EngineError(f"the model's logits are not finite (version {self.version})")
                request.fail(EngineError(f"adapter '{request.adapter}': its logits are not finite; use another"))
                self.passes.cache.clear(first + offset)
                ended.append(first + offset)
                continue
            if request.shaper is not None and request.shaper.is_stuck:
                request.refuse(f"after {len(request.ids)} tokens no token of this model is allowed; change the schema")
                ended.append(first + offset)
                continue
            try:
                request.add(token_id, logprob, self.version, ranked.get(first + offset))
            except Exception as error:  # noqa: BLE001 - a caller's on_token: ends its own request, no other
                request.fail(error)
            if request.answer.done():
                ended.append(first + offset)
            elif reason := self._finished(request, token_id):
                request.finish(reason)
                ended.append(first + offset)
        self._close_gaps(ended)

    def _finished(self, request: QueuedRequest, token_id: int) -> FinishReason | None:
        if token_id in request.stop_ids:
            return "stop"
        if stop := request.sampling.stop:
            # A character has at most four tokens of a byte-level tokenizer, so a longer tail is not needed.
            tail = self._decode(request.ids[-4 * max(map(len, stop)) - 4 :])
            if any(word in tail for word in stop):
                return "stop"
        return "length" if len(request.ids) >= request.sampling.max_tokens else None

    # --- rows

    def _forget_cancelled(self) -> None:
        self._close_gaps([row for row, request in enumerate(self._running) if request.answer.done()])
        if any(request.answer.done() for request in self._waiting):
            self._waiting.keep(lambda request: not request.answer.done())

    @torch.inference_mode()
    def _close_gaps(self, ended: list[int]) -> None:
        """Move the last live rows into the rows that ended, so that live rows stay first."""
        if not ended:
            return
        gone = set(ended)
        left = len(self._running) - len(ended)
        targets = [row for row in ended if row < left]
        sources = [row for row in range(left, len(self._running)) if row not in gone]
        for source, target in zip(sources, targets, strict=True):
            self._running[target] = self._running[source]
        del self._running[left:]
        self.passes.move(sources, targets, left)

    def _fail_all(self, error: EngineError) -> None:
        for request in (*self._running, *self._waiting):
            if not request.answer.done():
                request.answer.set_exception(error)
        self._running = []
        self._waiting.keep(lambda _: False)

    # --- refusals

    def _refuse_what_does_not_fit(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        if not prompt_ids:
            raise EngineError("engine: an empty prompt; send at least one token")
        length = len(prompt_ids) + sampling.max_tokens
        if length > min(self.max_context, self._kv_positions):
            raise EngineError(
                f"engine: {len(prompt_ids)} prompt tokens and max_tokens = {sampling.max_tokens} exceed the context of "
                f"{min(self.max_context, self._kv_positions)}; ask for fewer, or raise engine.max_context or kv_gib"
            )

    def _refuse_images(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        if not sampling.images:
            return
        if self._vision is None:
            raise SamplingRefused(self.why_not(sampling))
        # On this thread: the renderer has asked for their sizes already. What cannot be read ends this request alone.
        if why := why_misplaced(prompt_ids, sampling.images, self._vision.images):
            raise SamplingRefused(f"images: {why}")
